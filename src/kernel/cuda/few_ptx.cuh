/* SPDX-License-Identifier: Apache-2.0 */
/*
 * few_ptx.cuh - the instructions of Hopper that CUDA C has no word for, one small function each.
 *
 * Addresses of shared memory are 32-bit numbers (shared_address).  Names and meaning are those of the PTX ISA.
 */
#ifndef ATTN_FEW_PTX_CUH
#define ATTN_FEW_PTX_CUH

#include <stdint.h>

#define PTX static __device__ __forceinline__

PTX uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* ---- barriers of the copy engine ---- */

PTX void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* The copy engine, too, shall see the barriers that this thread has made. */
PTX void mbarrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PTX void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and makes the phase wait for so many bytes more. */
PTX void mbarrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Until the phase of this parity is over. */
PTX void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- the copy engine ---- */

PTX void tma_prefetch(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* A box of a tensor of 4 dimensions to shared memory; policy: of the second-level cache, as made below. */
PTX void tma_load_4d(uint32_t to, const void *map, uint32_t barrier, int x, int y, int z, int w, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
                 : "memory");
}

/* For what is read once. */
PTX uint64_t policy_evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* What ordinary stores have put into shared memory shall be seen by wgmma and the copy engine. */
PTX void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* 16 bytes to shared memory, of which the first `bytes` are read and the others 0; done for this thread after
 * the wait. */
PTX void copy_async_16(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

PTX void copy_async_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- barriers among some warps ---- */

/* Waits for all of them; true for all if `flag` was for one. */
PTX bool named_barrier_or(int id, int threads, bool flag)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred in, out;\n"
                 "setp.ne.u32 in, %3, 0;\n"
                 "barrier.red.or.pred.aligned out, %1, %2, in;\n"
                 "selp.u32 %0, 1, 0, out;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)flag)
                 : "memory");
    return any != 0;
}

/* ---- kernels that follow each other without a gap ---- */

/* Until the kernels before this one have ended and what they wrote is there. */
PTX void grid_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* The kernel after this one may begin, as far as its own grid_wait(). */
PTX void grid_release()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- arithmetic ---- */

/* 2^x, to 2 units in the last place. */
PTX float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

PTX uint32_t pack_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

PTX uint32_t pack_f16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* ---- wgmma ---- */

/*
 * A matrix in shared memory, in rows of 128 bytes whose 16-byte pieces are swizzled by the row mod 8; 8 such
 * rows, 1024 bytes, are an atom.  stride: bytes from an atom to the next along the rows; lead: along the
 * 64 elements of a row, and only where the rows run along the sum (a transposed operand).
 */
PTX uint64_t wgmma_matrix(uint32_t address, uint32_t lead, uint32_t stride)
{
    return (uint64_t)1 << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)((address & 0x3ffff) >> 4);
}

/* Registers and shared memory that this thread has written may be read by the products that follow. */
PTX void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PTX void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most `pending` groups are not done. */
#define wgmma_wait(pending) asm volatile("wgmma.wait_group.sync.aligned " #pending ";" ::: "memory")

/* Operands 0 .. n-1 of an asm, as text and as constraints. */
#define PTX_TEXT_16                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_TEXT_32                                                                                          \
    PTX_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_TEXT_64                                                                                          \
    PTX_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "         \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_TEXT_128                                                                                         \
    PTX_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "         \
                "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
                "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
                "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
                "%126, %127"
#define PTX_4(d, i)  "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define PTX_16(d, i) PTX_4(d, i), PTX_4(d, (i) + 4), PTX_4(d, (i) + 8), PTX_4(d, (i) + 12)
#define PTX_32(d, i) PTX_16(d, i), PTX_16(d, (i) + 16)
#define PTX_64(d, i) PTX_32(d, i), PTX_32(d, (i) + 32)
#define PTX_128(d, i) PTX_64(d, i), PTX_64(d, (i) + 64)

/*
 * d[64][n] = a[64][16] b[n][16]^T, added to d if `add`; a and b in shared memory, both with rows along the sum.
 * count = n / 2 registers; a, b, add: their operands' numbers, count .. count + 2.
 */
#define PTX_WGMMA_SHARED(name, type, n, count, a_, b_, add_)                                                 \
    PTX void name(float *d, uint64_t a, uint64_t b, bool add)                                                \
    {                                                                                                        \
        asm volatile("{\n"                                                                                   \
                     ".reg .pred add;\n"                                                                     \
                     "setp.ne.u32 add, " add_ ", 0;\n"                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " PTX_TEXT_##count    \
                     "}, " a_ ", " b_ ", add, 1, 1, 0, 0;\n"                                                 \
                     "}"                                                                                     \
                     : PTX_##count(d, 0)                                                                     \
                     : "l"(a), "l"(b), "r"((uint32_t)add)                                                    \
                     : "memory");                                                                            \
    }

/* d[64][n] += a[64][16] b[16][n]; a in registers, b in shared memory with rows along n. */
#define PTX_WGMMA_REGISTERS(name, type, n, count, a0_, a1_, a2_, a3_, b_)                                    \
    PTX void name(float *d, const uint32_t *a, uint64_t b)                                                   \
    {                                                                                                        \
        asm volatile("{\n"                                                                                   \
                     ".reg .pred add;\n"                                                                     \
                     "setp.eq.u32 add, 0, 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " PTX_TEXT_##count    \
                     "}, {" a0_ ", " a1_ ", " a2_ ", " a3_ "}, " b_ ", add, 1, 1, 1;\n"                      \
                     "}"                                                                                     \
                     : PTX_##count(d, 0)                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                    \
                     : "memory");                                                                            \
    }

PTX_WGMMA_SHARED(wgmma_bf16_64x32_shared, "bf16", 32, 16, "%16", "%17", "%18")
PTX_WGMMA_SHARED(wgmma_bf16_64x64_shared, "bf16", 64, 32, "%32", "%33", "%34")
PTX_WGMMA_SHARED(wgmma_f16_64x32_shared, "f16", 32, 16, "%16", "%17", "%18")
PTX_WGMMA_SHARED(wgmma_f16_64x64_shared, "f16", 64, 32, "%32", "%33", "%34")
PTX_WGMMA_REGISTERS(wgmma_bf16_64x64_rows, "bf16", 64, 32, "%32", "%33", "%34", "%35", "%36")
PTX_WGMMA_REGISTERS(wgmma_bf16_64x128_rows, "bf16", 128, 64, "%64", "%65", "%66", "%67", "%68")
PTX_WGMMA_REGISTERS(wgmma_bf16_64x256_rows, "bf16", 256, 128, "%128", "%129", "%130", "%131", "%132")
PTX_WGMMA_REGISTERS(wgmma_f16_64x64_rows, "f16", 64, 32, "%32", "%33", "%34", "%35", "%36")
PTX_WGMMA_REGISTERS(wgmma_f16_64x128_rows, "f16", 128, 64, "%64", "%65", "%66", "%67", "%68")
PTX_WGMMA_REGISTERS(wgmma_f16_64x256_rows, "f16", 256, 128, "%128", "%129", "%130", "%131", "%132")

#endif
