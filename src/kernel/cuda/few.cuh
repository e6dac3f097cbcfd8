/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few.cuh - the forward of few query rows against many keys, at the speed of memory; a short .cu file for
 * each head dimension and dtype includes this.
 *
 * METHOD.  The query heads of a kv head and their tokens are the rows of one tile, so that K and V are read
 * once for all of them; the keys are shared by all blocks (few_share.cuh; the idea of Flash-Decoding, Dao et
 * al. 2023, with the even cut of Stream-K, Osama et al., arXiv 2301.03598), and few_merge.cu merges what they
 * found, or few_merge_direct.cu.  A block is a warp that lets the copy engine fill a ring of tiles of K and V in turn, one or two that
 * fetch the rows of Q of the next tile, and four or eight that compute:
 *
 *     S = Q K^T
 *     P = exp2(S * scale - max), sum     in registers, fp32; max moves when a score is 2^8 above it
 *     O += P V             P in registers, rounded to the dtype of the inputs
 *
 * A tile has room for FEW_HEIGHT rows.  Up to 16 each warp has all of them and a fourth of the keys, and multiplies by
 * itself (few_narrow.cuh).  64 rows are a warpgroup, whose products have as many whatever of them is used
 * (few_wide.cuh), 128 are two, which read each stage of the ring together, so that 128 rows cost memory no more than
 * one.  Where shares are long, 64 rows of 128 or 256 dims are two warpgroups, too (FEW_SPLIT, few_split.cuh).
 *
 * Two blocks live on a multiprocessor, so that one computes while the other waits; of 256 dims, which has
 * the time, or 128 rows, whose warpgroups do so, one.  Parts of 64 and 128 rows are large: where every tile has the same
 * number of blocks, an even one, two neighbours are a cluster and write one part, each half of its columns.
 *
 * MASK, NaN.  A masked score is replaced by -inf.  Where a tile of V has keys that not all rows see, elements
 * of theirs that are not finite become 0 before the product, and are added to the rows that see them after
 * it.
 *
 * COST.  The bytes of K and V, once; each block's partials, two tiles at most (docs/perf/cuda_few.md).
 */
#include "kernel/cuda/few_share.cuh"

#ifndef FEW_SPLIT
#define FEW_SPLIT 0
#endif

enum {
    DIM = FEW_DIM,
    NARROW = FEW_HEIGHT == 16,
    SPLIT = FEW_SPLIT,
    KEYS = FEW_KEYS(DIM, FEW_HEIGHT, SPLIT),
    STAGE = FEW_STAGE(DIM, FEW_HEIGHT, SPLIT), /* bytes */
    WIDTH = STAGE / KEYS / 2, /* dims of a stage, 64, 128 or all: 128 bytes of all its keys, then the next 64 */
    STAGES = FEW_STAGES(DIM, FEW_HEIGHT, SPLIT),
    COMPUTING = FEW_COMPUTING(FEW_HEIGHT, SPLIT), /* threads */
    WARPS = COMPUTING / 32,
    COLUMNS = SPLIT ? DIM / 2 : DIM, /* of a tile, whose sums a warp has */
    OWN_COLUMNS = NARROW ? DIM / WARPS : COLUMNS, /* those that it ends up with */
    OWN_KEYS = NARROW ? KEYS / WARPS : KEYS, /* of a stage, that a warp works on */
    READERS = SPLIT ? WARPS / 2 : WARPS, /* warps that read a stage */
    FELLOWS = NARROW ? 32 : SPLIT ? 128 : COMPUTING, /* threads that work on the same keys and columns */
    SCORES = NARROW ? OWN_KEYS / 2 : KEYS / 2, /* of a thread: of 16 rows in 32 threads */
    Q_ROWS = FEW_HEIGHT,
    Q_WARP_ROWS = Q_ROWS < 64 ? Q_ROWS : 64, /* of Q, that a warp fetches */
    Q_WARPS = Q_ROWS / Q_WARP_ROWS,
    Q_BYTES = Q_ROWS * DIM * 2,
    RING = Q_BYTES, /* where the ring begins, behind Q */
    WEIGHTS = RING + STAGES * STAGE,
    WEIGHTS_SIZE = FEW_WEIGHTS(DIM, SPLIT) / 2,
    GATHER = WEIGHTS + FEW_WEIGHTS(DIM, SPLIT),
    BARRIERS = GATHER + FEW_GATHER(DIM, FEW_HEIGHT, SPLIT),
    Q_BARRIERS = BARRIERS + STAGES * 16,
    PAIR_BARRIER = Q_BARRIERS + 16,
    KEPT = PAIR_BARRIER + 16,
    TOPS = KEPT + FEW_KEPT(FEW_HEIGHT)
};

/* Of three warpgroups two compute, with registers of the third. */
#if FEW_HEIGHT == 128 && FEW_DIM == 64
#define MORE_REGISTERS PTX_REGISTERS_MORE(192)
#define LESS_REGISTERS PTX_REGISTERS_LESS(48)
#elif FEW_HEIGHT == 128
#define MORE_REGISTERS PTX_REGISTERS_MORE(224)
#define LESS_REGISTERS PTX_REGISTERS_LESS(56)
#else
#define MORE_REGISTERS (void)0
#define LESS_REGISTERS (void)0
#endif

#include "kernel/cuda/few_load.cuh"
#include "kernel/cuda/few_rows.cuh"
#if FEW_HEIGHT == 16
#include "kernel/cuda/few_narrow.cuh"
#else
#include "kernel/cuda/wgmma.cuh"
#include "kernel/cuda/few_pair.cuh"
#endif
#if FEW_SPLIT
#include "kernel/cuda/few_split.cuh"
#else
#if FEW_HEIGHT > 16
#include "kernel/cuda/few_wide.cuh"
#endif
#include "kernel/cuda/few_tiles.cuh"
#endif

FEW void make_barriers(uint32_t shared)
{
    for (uint32_t i = 0; i < STAGES; i++) {
        few_turn t = {i, 0};
        ptx_barrier_init(ring_barrier(shared, t), 1);
        ptx_barrier_init(ring_barrier(shared, t) + 8, READERS);
    }
    ptx_barrier_init(shared + Q_BARRIERS, Q_WARPS * 32);
    ptx_barrier_init(shared + Q_BARRIERS + 8, WARPS);
    if (!NARROW) {
        ptx_barrier_init(shared + PAIR_BARRIER, 1);
        ptx_barrier_expect(shared + PAIR_BARRIER, FEW_GATHER(DIM, FEW_HEIGHT, SPLIT));
    }
    ptx_barrier_init_fence();
}

extern "C" __global__ void __maxnreg__(FEW_REGISTERS(DIM, FEW_HEIGHT, SPLIT))
    few(const __grid_constant__ few_params params)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    const few_params *p = &params;
    int warp = (int)(threadIdx.x / 32) - WARPS;
    if (threadIdx.x == 0) {
        make_barriers(ptx_shared(shared));
        ptx_prefetch_map(&p->k);
        ptx_prefetch_map(&p->v);
    }
    if (NARROW) {
        __syncthreads();
    } else {
        ptx_cluster_sync();
    }
    few_share share;
    if (!few_fixed(p)) {
        ptx_grid_wait();
    }
    bool mine = few_share_first(p, &share);
    if (warp < 0) {
        MORE_REGISTERS;
        if (mine) {
            compute_share(p, &share, shared);
        }
        return;
    }
    LESS_REGISTERS;
    if (warp == 0) {
        if (mine && few_fixed(p) && threadIdx.x % 32 == 0) {
            find_pages(p, &share);
        }
        ptx_grid_wait();
        ptx_grid_go();
        if (mine && threadIdx.x % 32 == 0) {
            load_share(p, &share, ptx_shared(shared));
        }
    } else if (warp <= Q_WARPS) {
        if (mine) {
            load_share_q(p, &share, ptx_shared(shared));
        }
        ptx_grid_wait();
        if (warp == 1) {
            write_empty(p);
        }
    }
}
