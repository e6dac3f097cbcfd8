# SPDX-License-Identifier: Apache-2.0
#
# The CUDA kernels: each .cu of ATTN_CUBINS becomes a cubin for sm_90a, and all of them bytes of one object.
#
# Only the compiler and <cuda.h> are needed to build, and only the driver to run: nothing is linked.  CMake's
# own CUDA language is not used, because it wants a C++ compiler and links the runtime library.
set(ATTN_WITH_CUDA AUTO CACHE STRING "CUDA kernels for Hopper: AUTO, ON or OFF")
set_property(CACHE ATTN_WITH_CUDA PROPERTY STRINGS AUTO ON OFF)

set(ATTN_CUDA_MISSING "")
if(ATTN_WITH_CUDA STREQUAL "OFF")
    set(ATTN_CUDA_MISSING "not wanted")
else()
    find_program(ATTN_NVCC nvcc PATHS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
    mark_as_advanced(ATTN_NVCC)
    if(ATTN_NVCC)
        get_filename_component(ATTN_CUDA_ROOT ${ATTN_NVCC} REALPATH)
        get_filename_component(ATTN_CUDA_ROOT ${ATTN_CUDA_ROOT}/../.. ABSOLUTE)
        find_path(ATTN_CUDA_INCLUDE cuda.h HINTS ${ATTN_CUDA_ROOT}/include
            ${ATTN_CUDA_ROOT}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include)
        mark_as_advanced(ATTN_CUDA_INCLUDE)
        execute_process(COMMAND ${ATTN_NVCC} --version OUTPUT_VARIABLE ATTN_NVCC_TEXT ERROR_QUIET)
        string(REGEX MATCH "release ([0-9]+)" ATTN_NVCC_RELEASE "${ATTN_NVCC_TEXT}")
        if(NOT CMAKE_MATCH_1)
            set(ATTN_CUDA_MISSING "${ATTN_NVCC} does not run")
        elseif(CMAKE_MATCH_1 LESS 13)
            set(ATTN_CUDA_MISSING "${ATTN_NVCC} is of CUDA ${CMAKE_MATCH_1}, and 13 is needed")
        elseif(NOT ATTN_CUDA_INCLUDE)
            set(ATTN_CUDA_MISSING "cuda.h missing")
        elseif(CMAKE_CROSSCOMPILING)
            set(ATTN_CUDA_MISSING "not when cross-compiling")
        endif()
    else()
        set(ATTN_CUDA_MISSING "nvcc missing; NVIDIA's CUDA toolkit 13 brings it")
    endif()
endif()

if(ATTN_CUDA_MISSING AND ATTN_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUDA: ${ATTN_CUDA_MISSING}; set ATTN_WITH_CUDA=OFF to build without GPU kernels")
elseif(ATTN_CUDA_MISSING)
    message(STATUS "CUDA: ${ATTN_CUDA_MISSING} (kernels for Hopper GPUs)")
    set(ATTN_KERNEL_CUDA ${ATTN_KERNEL_NO_CUDA})
    return()
endif()
message(STATUS "CUDA: found, ${ATTN_NVCC} (kernels for Hopper GPUs)")

set(ATTN_CUDA_FOLDER ${PROJECT_BINARY_DIR}/cuda)
file(MAKE_DIRECTORY ${ATTN_CUDA_FOLDER})

# attn_cubin(variable source): the cubin of a .cu file, whose path goes into the variable
function(attn_cubin variable source)
    get_filename_component(name ${source} NAME_WE)
    set(cubin ${ATTN_CUDA_FOLDER}/${name}.cubin)
    add_custom_command(
        OUTPUT ${cubin}
        COMMAND ${CMAKE_COMMAND} -DNVCC=${ATTN_NVCC} -DSOURCE=${PROJECT_SOURCE_DIR}/${source} -DOUTPUT=${cubin}
                -DDEPFILE=${cubin}.d -DINCLUDE=${PROJECT_SOURCE_DIR}/src -P ${PROJECT_SOURCE_DIR}/cmake/cubin.cmake
        DEPENDS ${PROJECT_SOURCE_DIR}/${source} ${PROJECT_SOURCE_DIR}/cmake/cubin.cmake
        DEPFILE ${cubin}.d
        COMMENT "Compiling ${name} for sm_90a"
        VERBATIM)
    set(${variable} ${cubin} PARENT_SCOPE)
endfunction()

set(ATTN_CUDA_TABLE "")
set(ATTN_CUBIN_FILES "")
foreach(source IN LISTS ATTN_CUBINS)
    get_filename_component(name ${source} NAME_WE)
    attn_cubin(cubin ${source})
    list(APPEND ATTN_CUBIN_FILES ${cubin})
    string(APPEND ATTN_CUDA_TABLE "CUBIN(${name}, \"${cubin}\")\n")
endforeach()
file(GENERATE OUTPUT ${ATTN_CUDA_FOLDER}/cubins.inc.h CONTENT "${ATTN_CUDA_TABLE}")
set_property(SOURCE src/kernel/cuda/images.c APPEND PROPERTY OBJECT_DEPENDS "${ATTN_CUBIN_FILES}")

# The contestant naive of the program's bench, which loads cuBLASLt when it runs.
find_file(ATTN_CUBLASLT_HEADER cublasLt.h PATHS ${ATTN_CUDA_INCLUDE} NO_DEFAULT_PATH)
mark_as_advanced(ATTN_CUBLASLT_HEADER)
if(ATTN_CUBLASLT_HEADER)
    message(STATUS "CUBLASLT: found (the bench's naive attention on a GPU, loaded when it runs)")
    attn_cubin(ATTN_SOFTMAX_CUBIN ${ATTN_CLI_CUBIN})
    set_property(SOURCE cli/softmax_cuda.c APPEND PROPERTY OBJECT_DEPENDS ${ATTN_SOFTMAX_CUBIN})
    set_property(SOURCE cli/softmax_cuda.c APPEND PROPERTY
        COMPILE_DEFINITIONS ATTN_SOFTMAX_CUBIN="${ATTN_SOFTMAX_CUBIN}")
    set(ATTN_HAVE_CUBLASLT ON)
else()
    message(STATUS "CUBLASLT: missing (the bench's naive attention on a GPU; NVIDIA's CUDA toolkit 13 brings it)")
endif()
