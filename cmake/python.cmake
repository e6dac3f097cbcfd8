# SPDX-License-Identifier: Apache-2.0
#
# The target attn_wheel: a wheel of the Python package with this library inside, in <build folder>/wheel.
find_program(ATTN_PYTHON NAMES python3 DOC "Python that writes the wheel; any version from 3.8 does")
if(BUILD_SHARED_LIBS AND ATTN_PYTHON)
    add_custom_target(attn_wheel
        COMMAND ${ATTN_PYTHON} ${PROJECT_SOURCE_DIR}/python/build_backend.py
            --library $<TARGET_FILE:attn> ${PROJECT_BINARY_DIR}/wheel
        VERBATIM COMMENT "Python wheel")
    add_dependencies(attn_wheel attn)
endif()
