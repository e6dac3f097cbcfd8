/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_type.cuh - the 16-bit dtype of a .cu file: F16 set is fp16, else bf16.
 */
#ifndef ATTN_FLASH_BACKWARD_TYPE_CUH
#define ATTN_FLASH_BACKWARD_TYPE_CUH

#ifdef F16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#include "kernel/cuda/wgmma.cuh"

PTX_INLINE uint32_t pack(float low, float high)
{
#ifdef F16
    return ptx_pack_f16(low, high);
#else
    return ptx_pack_bf16(low, high);
#endif
}

PTX_INLINE float unpack_low(uint32_t pair)
{
#ifdef F16
    return ptx_unpack_f16((uint16_t)pair);
#else
    return __uint_as_float(pair << 16);
#endif
}

PTX_INLINE float unpack_high(uint32_t pair)
{
#ifdef F16
    return ptx_unpack_f16((uint16_t)(pair >> 16));
#else
    return __uint_as_float(pair & 0xffff0000u);
#endif
}

#endif
