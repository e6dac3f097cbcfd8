/* SPDX-License-Identifier: Apache-2.0 */
/* flash_dot.inc.h - frame */
#include "kernel/cpu/dot_pack.h"

#include "kernel/cpu/flash_dot_backward.inc.h"

static int64_t tile_q(const attn__shape *shape)
{
    (void)shape;
    return 1;
}

static const char *rejects(const attn__shape *shape)
{
    return shape->backward ? NULL : "is not complete";
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

const attn__kernel FLASH_ROW = {
    .name = FLASH_NAME,
    .summary = FLASH_SUMMARY,
    .needs = FLASH_NEEDS,
    .tile_q = tile_q,
    .rejects = rejects,
    .scratch = scratch_bytes,
    .forward = forward,
    .backward_tile_q = backward_tile_q,
    .backward_tile_k = backward_tile_k,
    .backward_scratch = backward_scratch,
    .backward = backward,
};

static void probe_dot(const attn__dot *dot)
{
    dot_begin();
    dot_product(dot);
    dot_end();
}

const attn__probe FLASH_PROBE = {
    .lanes = VEC_LANES, .exp2 = probe_exp2, .peak = probe_peak, .dot = probe_dot, .dot_peak = probe_dot_peak};
