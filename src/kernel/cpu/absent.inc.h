/* SPDX-License-Identifier: Apache-2.0 */
/*
 * absent.inc.h - the row of a kernel that this build cannot contain (other architecture or compiler).
 *
 * The row stays in the table so that `attn plan --explain` can say why it is not taken; nothing calls its
 * functions but rejects.  FLASH_NAME, FLASH_SUMMARY, FLASH_NEEDS, FLASH_ROW and FLASH_PROBE as in
 * flash.inc.h.
 */
static int64_t tile_q(const attn__shape *shape)
{
    (void)shape;
    return 1;
}

static const char *rejects(const attn__shape *shape)
{
    (void)shape;
    return "not built for this architecture";
}

static size_t scratch_bytes(const attn__shape *shape)
{
    (void)shape;
    return 0;
}

static void forward(const attn__block *block, void *scratch)
{
    (void)block, (void)scratch;
}

static void backward(const attn__gradient *gradient, void *scratch)
{
    (void)gradient, (void)scratch;
}

const attn__kernel FLASH_ROW = {
    .name = FLASH_NAME,
    .summary = FLASH_SUMMARY,
    .needs = FLASH_NEEDS,
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = tile_q,
    .backward_tile_k = tile_q,
    .backward_step = tile_q,
    .backward_scratch = scratch_bytes,
    .backward = backward,
};

const attn__probe FLASH_PROBE = {0};
