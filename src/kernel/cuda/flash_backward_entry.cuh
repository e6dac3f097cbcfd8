/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flash_backward_entry.cuh - the main kernel's entry: two warpgroups of consumers and a producer.
 */

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_backward(const __grid_constant__ attn__backward_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *m = (shared_memory *)memory;
    if (threadIdx.x == 0) {
        ptx_barrier_init(ptx_shared(&m->keys_full), 1);
        ptx_barrier_init(ptx_shared(&m->keys_empty), 8);
        for (int i = 0; i < Q_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->q_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->q_empty[i]), 8);
        }
        for (int i = 0; i < 2; i++) {
            ptx_barrier_init(ptx_shared(&m->ds_full[i]), 8);
            ptx_barrier_init(ptx_shared(&m->ds_empty[i]), 8);
        }
        for (int i = 0; i < O_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&m->o_full[i]), 1);
            ptx_barrier_init(ptx_shared(&m->o_empty[i]), 8);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_grid_wait();
    if (threadIdx.x >= CONSUMERS) {
        PTX_REGISTERS_LESS(24);
        if (threadIdx.x == CONSUMERS) {
            produce(&p, m);
        }
    } else {
        PTX_REGISTERS_MORE(240);
        consume(&p, m);
    }
}
