# SPDX-License-Identifier: Apache-2.0
#
# Every source file of the library and the program, by module.  A new file is one line here;
# script/check-sources fails when a file is forgotten.

set(ATTN_BASE
    src/base/clock.c
    src/base/cpu.c
    src/base/dtype.c
    src/base/hash.c
    src/base/memory.c
    src/base/status.c)

set(ATTN_QUORUM
    src/quorum/band.c
    src/quorum/cost.c
    src/quorum/cover.c
    src/quorum/fit.c
    src/quorum/prove.c
    src/quorum/schedule.c
    src/quorum/search.c
    src/quorum/singer.c
    src/quorum/table.c
    src/quorum/wichmann.c)

set(ATTN_KERNEL
    src/kernel/delta.c
    src/kernel/merge.c
    src/kernel/naive.c
    src/kernel/reference.c
    src/kernel/table.c
    src/kernel/cuda_choose.c
    src/kernel/cpu/flash_amx.c
    src/kernel/cpu/flash_avx2.c
    src/kernel/cpu/flash_avx512.c
    src/kernel/cpu/flash_avx512bf16.c
    src/kernel/cpu/flash_neon.c
    src/kernel/cpu/flash_portable.c)

# One of the two: with a CUDA compiler or without (cmake/cuda.cmake).
set(ATTN_KERNEL_NO_CUDA
    src/kernel/cuda_absent.c)
set(ATTN_KERNEL_CUDA
    src/kernel/cuda/bf16x3_backward.c
    src/kernel/cuda/driver.c
    src/kernel/cuda/few.c
    src/kernel/cuda/flash_backward.c
    src/kernel/cuda/flash_forward.c
    src/kernel/cuda/flash_sm90.c
    src/kernel/cuda/fma_launch.c
    src/kernel/cuda/map.c
    src/kernel/cuda/images.c
    src/kernel/cuda/public.c
    src/kernel/cuda/table.c)

# each becomes a cubin of that name
set(ATTN_CUBINS
    src/kernel/cuda/bf16x3_backward_keys_128.cu
    src/kernel/cuda/bf16x3_backward_keys_64.cu
    src/kernel/cuda/bf16x3_backward_queries_128.cu
    src/kernel/cuda/bf16x3_backward_queries_64.cu
    src/kernel/cuda/bf16x3_forward_128.cu
    src/kernel/cuda/bf16x3_forward_64.cu
    src/kernel/cuda/bf16x3_parts.cu
    src/kernel/cuda/few16_bf16_128.cu
    src/kernel/cuda/few16_bf16_256.cu
    src/kernel/cuda/few16_bf16_64.cu
    src/kernel/cuda/few16_f16_128.cu
    src/kernel/cuda/few16_f16_256.cu
    src/kernel/cuda/few16_f16_64.cu
    src/kernel/cuda/few_bf16_128.cu
    src/kernel/cuda/few_bf16_256.cu
    src/kernel/cuda/few_bf16_64.cu
    src/kernel/cuda/few_f16_128.cu
    src/kernel/cuda/few_f16_256.cu
    src/kernel/cuda/few_f16_64.cu
    src/kernel/cuda/few_merge.cu
    src/kernel/cuda/flash_backward_bf16_128.cu
    src/kernel/cuda/flash_backward_bf16_256.cu
    src/kernel/cuda/flash_backward_bf16_64.cu
    src/kernel/cuda/flash_backward_bf16_rows.cu
    src/kernel/cuda/flash_backward_f16_128.cu
    src/kernel/cuda/flash_backward_f16_256.cu
    src/kernel/cuda/flash_backward_f16_64.cu
    src/kernel/cuda/flash_backward_f16_rows.cu
    src/kernel/cuda/flash_forward_bf16_128.cu
    src/kernel/cuda/flash_forward_bf16_128_long.cu
    src/kernel/cuda/flash_forward_bf16_256.cu
    src/kernel/cuda/flash_forward_bf16_64.cu
    src/kernel/cuda/flash_forward_bf16_64_long.cu
    src/kernel/cuda/flash_forward_f16_128.cu
    src/kernel/cuda/flash_forward_f16_128_long.cu
    src/kernel/cuda/flash_forward_f16_256.cu
    src/kernel/cuda/flash_forward_f16_64.cu
    src/kernel/cuda/flash_forward_f16_64_long.cu
    src/kernel/cuda/fma_backward_128.cu
    src/kernel/cuda/fma_backward_256.cu
    src/kernel/cuda/fma_backward_64.cu
    src/kernel/cuda/fma_forward_128.cu
    src/kernel/cuda/fma_forward_256.cu
    src/kernel/cuda/fma_forward_512.cu
    src/kernel/cuda/fma_forward_64.cu
    src/kernel/cuda/fma_rows.cu)

set(ATTN_COMM
    src/comm/local.c)

set(ATTN_ENGINE
    src/engine/backward.c
    src/engine/device.c
    src/engine/direct.c
    src/engine/execute.c
    src/engine/few.c
    src/engine/inspect.c
    src/engine/io.c
    src/engine/peak.c
    src/engine/problem.c
    src/engine/ranges.c
    src/engine/reference.c
    src/engine/reference_backward.c
    src/engine/scheduler.c
    src/engine/sequence.c
    src/engine/spool.c
    src/engine/stage.c
    src/engine/tiler.c
    src/engine/worker.c)

# all but main.c, so that tests can link the parts
set(ATTN_CLI
    cli/arrays.c
    cli/bench_attention.c
    cli/bench_attention_case.c
    cli/bench_attention_options.c
    cli/bench_attention_table.c
    cli/bench_cqs.c
    cli/bench_cqs_case.c
    cli/bench_cqs_cuda.c
    cli/bytes.c
    cli/check.c
    cli/check_case.c
    cli/check_grid.c
    cli/completion.c
    cli/help.c
    cli/contest.c
    cli/contest_naive.c
    cli/contest_naive_cuda.c
    cli/contest_store.c
    cli/gpu.c
    cli/info.c
    cli/json.c
    cli/json_read.c
    cli/machine.c
    cli/man.c
    cli/measure.c
    cli/memory.c
    cli/npy.c
    cli/options.c
    cli/output.c
    cli/picture.c
    cli/picture_color.c
    cli/picture_draw.c
    cli/picture_png.c
    cli/picture_svg.c
    cli/picture_term.c
    cli/plan.c
    cli/plan_json.c
    cli/plan_options.c
    cli/plan_sweep.c
    cli/plan_tables.c
    cli/plan_text.c
    cli/place.c
    cli/product_cuda.c
    cli/progress.c
    cli/random.c
    cli/report.c
    cli/results.c
    cli/run.c
    cli/run_data.c
    cli/run_options.c
    cli/run_plan.c
    cli/run_report.c
    cli/safetensors.c
    cli/softmax.c
    cli/softmax_cuda.c
    cli/summary.c
    cli/table.c
    cli/tensors.c
    cli/text.c
    cli/values.c
    cli/verify.c
    cli/verify_backward.c)

# likewise; the softmax of the bench's naive attention on a GPU
set(ATTN_CLI_CUBIN
    cli/softmax_cuda.cu)

# each verb has a man page
set(ATTN_VERBS "bench attention" "bench cqs" check completion help info plan run)
