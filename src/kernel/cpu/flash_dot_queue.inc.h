/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_dot_queue.inc.h - products that go on step by step beside other work on vectors; a part of
 * flash_dot.inc.h, which includes it.
 *
 * METHOD.  Whoever works on vectors divides that work into shares, and calls take_share() at the begin of
 * each: the last step comes with the last share.  A core looks some 500 operations ahead: tiles and vectors
 * work side by side only if their instructions alternate more finely than that.
 */
typedef struct dot_queue {
    attn__dot dots[3];
    dot_cursor at;
    int64_t steps, shares;
    int64_t due; /* steps * shares so far - shares * steps taken */
} dot_queue;

enum { JOIN_ROWS = 8 /* of join_sums(), a share */ };

/* After `count` dots are filled in, where they lie: literals of structs would be copied by vectors, which
 * have to wait for the stores of their fields. */
static void start_queue(dot_queue *queue, int count, int64_t shares)
{
    dot_start(&queue->at, queue->dots, count);
    queue->shares = shares;
    queue->due = queue->steps = 0;
    for (int i = 0; i < count; i++) {
        queue->steps += dot_steps(&queue->dots[i]);
    }
}

/* The queue's part of steps for one share; none are left if there were more shares than were told. */
VEC_INLINE void take_share(const int parts, dot_queue *queue)
{
    for (queue->due += queue->steps; queue->due >= queue->shares; queue->due -= queue->shares) {
        dot_step(parts == 1, &queue->at);
    }
}

/* The same in strides: for vectors that have little to do. */
static void take_strides(dot_queue *queue)
{
    for (queue->due += queue->steps; queue->due >= queue->shares;) {
        queue->due -= queue->shares * dot_stride(&queue->at);
    }
}

/* to = to * fade + sums, [rows][PANEL], which were summed apart in several parts; rows % JOIN_ROWS = 0. */
VEC_INLINE void join_sums(float *to, vec fade0, vec fade1, const float *sums, int64_t rows, dot_queue *queue)
{
    for (int64_t row = 0; row < rows; row++, to += PANEL, sums += PANEL) {
        if (row % JOIN_ROWS == 0) {
            take_share(WEIGHT_PARTS, queue);
        }
        vec_store(to, vec_fma(vec_load(to), fade0, vec_load(sums)));
        vec_store(to + VEC_LANES, vec_fma(vec_load(to + VEC_LANES), fade1, vec_load(sums + VEC_LANES)));
    }
}
