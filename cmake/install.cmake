# SPDX-License-Identifier: Apache-2.0
#
# What `cmake --install` puts in place: library, headers, program, attn.pc, attnConfig.cmake, man pages and
# shell completions.
include(CMakePackageConfigHelpers)

install(TARGETS attn EXPORT attnTargets
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/attn/attn.h include/attn/comm.h include/attn/cuda.h include/attn/plan.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/attn)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES docs/man/attn.3 DESTINATION ${CMAKE_INSTALL_MANDIR}/man3)

# ---- for other builds: find_package(attn) and pkg-config ------------------------------------------

set(ATTN_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/attn)
if(BUILD_SHARED_LIBS)
    set(ATTN_STATIC OFF)
    set(ATTN_PC_LIBS "")
else()
    set(ATTN_STATIC ON)
    set(ATTN_PC_LIBS " ${OpenMP_C_FLAGS} -pthread -lm")
endif()
configure_package_config_file(cmake/attnConfig.cmake.in attnConfig.cmake INSTALL_DESTINATION ${ATTN_CMAKE_DIR})
write_basic_package_version_file(attnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT attnTargets NAMESPACE attn:: DESTINATION ${ATTN_CMAKE_DIR})
install(FILES ${PROJECT_BINARY_DIR}/attnConfig.cmake ${PROJECT_BINARY_DIR}/attnConfigVersion.cmake
    DESTINATION ${ATTN_CMAKE_DIR})

# The .pc file names its folders relative to its own place, so that an installed tree can be moved.
file(RELATIVE_PATH ATTN_PC_PREFIX
    ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/attn.pc.in attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# ---- the program, its man pages and completions: the program writes them itself --------------------

if(NOT ATTN_PROGRAM)
    return()
endif()
install(TARGETS attn_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(NOT ATTN_MAN OR CMAKE_CROSSCOMPILING)
    return()
endif()

# attn_written(output arguments...): a file that holds what `attn arguments` prints
set(ATTN_WRITTEN "")
function(attn_written output)
    set(path ${PROJECT_BINARY_DIR}/written/${output})
    add_custom_command(OUTPUT ${path}
        COMMAND attn_program ${ARGN} > ${path}
        DEPENDS attn_program VERBATIM COMMENT "attn ${ARGN}")
    list(APPEND ATTN_WRITTEN ${path})
    set(ATTN_WRITTEN ${ATTN_WRITTEN} PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/written)
attn_written(attn.1 help --man)
foreach(verb IN LISTS ATTN_VERBS)
    string(REPLACE " " "-" page ${verb})
    separate_arguments(words UNIX_COMMAND ${verb})
    attn_written(attn-${page}.1 help --man ${words})
endforeach()
set(ATTN_PAGES ${ATTN_WRITTEN})
attn_written(attn.bash completion bash)
attn_written(_attn completion zsh)
attn_written(attn.fish completion fish)
add_custom_target(attn_documents ALL DEPENDS ${ATTN_WRITTEN})

install(FILES ${ATTN_PAGES} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${PROJECT_BINARY_DIR}/written/attn.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME attn)
install(FILES ${PROJECT_BINARY_DIR}/written/_attn DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${PROJECT_BINARY_DIR}/written/attn.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
