# SPDX-License-Identifier: Apache-2.0
#
# Run as a script: compiles one .cu file to a cubin, and fails on what costs speed without a word elsewhere.
#
#   cmake -DNVCC=.. -DSOURCE=.. -DOUTPUT=.. -DDEPFILE=.. -DINCLUDE=.. -P cubin.cmake
#
# ptxas tells of spilled registers and of wgmma and setmaxnreg that it gave up on (C7508 to C7515, C7520) as
# mere information; here they are errors.
execute_process(
    COMMAND ${NVCC} -cubin -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -Werror all-warnings
            -Xptxas -v -I ${INCLUDE} -MD -MF ${DEPFILE} -MT ${OUTPUT} -o ${OUTPUT} ${SOURCE}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE text
    ERROR_VARIABLE text)
if(result EQUAL 0 AND text MATCHES "C75(0[89]|1[0-5]|20)")
    set(result "wgmma or setmaxnreg given up")
elseif(result EQUAL 0 AND text MATCHES "[1-9][0-9]* bytes spill")
    set(result "registers spilled")
endif()
if(NOT result EQUAL 0)
    file(REMOVE ${OUTPUT})
    message(FATAL_ERROR "${SOURCE}: ${result}\n${text}")
endif()
