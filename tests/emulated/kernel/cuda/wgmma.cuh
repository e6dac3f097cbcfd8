/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.cuh - in place of the header of this name, for bf16: each thread makes its part of a product when it is issued.
 * A warp goes on from a wait together, as on a GPU.
 */
#ifndef ATTN_TESTS_WGMMA_CUH
#define ATTN_TESTS_WGMMA_CUH

#include "kernel/cuda/ptx.cuh"

PTX_INLINE void ptx_wgmma_fence(void)
{
}
PTX_INLINE void ptx_wgmma_commit(void)
{
}
#define PTX_WGMMA_WAIT(n) machine_sync_warp()
PTX_INLINE void ptx_hold(float *accumulator, int count)
{
    (void)accumulator, (void)count;
}

/* Here a descriptor is the address, and above it the bytes from a panel to the next. */
PTX_INLINE uint64_t ptx_operand(uint32_t at, uint32_t panel)
{
    return (uint64_t)panel << 32 | at;
}
PTX_INLINE uint64_t ptx_operand_at(uint64_t operand, uint32_t bytes)
{
    return operand + bytes;
}

/* The number at an address before the 128-byte swizzle. */
PTX_INLINE float machine_bf16(uint32_t at)
{
    uint16_t bits;
    memcpy(&bits, shared + (at ^ (at >> 7 & 7) << 4), sizeof bits);
    return __uint_as_float((uint32_t)bits << 16);
}

/* Rows g and g + 8 of A, all 16 of k, by B; across: B's rows go along k. */
PTX_INLINE void machine_product(float *d, int columns, const float (*a)[16], uint64_t b, bool across, bool add)
{
    const uint32_t at = (uint32_t)b, panel = (uint32_t)(b >> 32);
    for (int i = 0; i < columns / 4; i++) {
        const uint32_t n = (uint32_t)(i / 2 * 8) + machine_thread() % 4 * 2 + (uint32_t)i % 2;
        float *sum = d + i / 2 * 4 + i % 2;
        double x[2] = {add ? sum[0] : 0.0, add ? sum[2] : 0.0};
        for (uint32_t k = 0; k < 16; k++) {
            const float y =
                machine_bf16(across ? at + k * 128 + n / 64 * panel + n % 64 * 2 : at + n * 128 + k * 2);
            x[0] += (double)a[0][k] * (double)y;
            x[1] += (double)a[1][k] * (double)y;
        }
        sum[0] = (float)x[0], sum[2] = (float)x[1];
    }
}

/* A from shared memory */
PTX_INLINE void machine_shared(float *d, int columns, uint64_t a, uint64_t b, int add)
{
    float rows[2][16];
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t row = machine_thread() / 32 % 4 * 16 + machine_thread() % 32 / 4 + i / 16 * 8;
        rows[i / 16][i % 16] = machine_bf16((uint32_t)a + row * 128 + i % 16 * 2);
    }
    machine_product(d, columns, rows, b, false, add != 0);
}
PTX_INLINE void wgmma_32_ss(float *d, uint64_t a, uint64_t b, int add)
{
    machine_shared(d, 32, a, b, add);
}
PTX_INLINE void wgmma_64_ss(float *d, uint64_t a, uint64_t b, int add)
{
    machine_shared(d, 64, a, b, add);
}

/* A from the registers of the four lanes that have these rows */
PTX_INLINE void machine_registers(float *d, int columns, const uint32_t *a, uint64_t b)
{
    float rows[2][16];
    const char *lanes = machine_exchange(a, 16) + machine_thread() % 32 / 4 * 4 * 64;
    for (int i = 0; i < 32; i++) { /* row, half of k, lane, half of a register */
        uint16_t bits;
        memcpy(&bits, lanes + i / 2 % 4 * 64 + (i / 16 + i / 8 % 2 * 2) * 4 + i % 2 * 2, sizeof bits);
        rows[i / 16][i % 16] = __uint_as_float((uint32_t)bits << 16);
    }
    machine_sync_warp();
    machine_product(d, columns, rows, b, true, true);
}
PTX_INLINE void wgmma_64_rt(float *d, const uint32_t *a, uint64_t b)
{
    machine_registers(d, 64, a, b);
}
PTX_INLINE void wgmma_128_rt(float *d, const uint32_t *a, uint64_t b)
{
    machine_registers(d, 128, a, b);
}

#endif
