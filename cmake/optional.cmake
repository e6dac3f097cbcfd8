# SPDX-License-Identifier: Apache-2.0
#
# Packages that are used where they are there, and done without where they are not.
#
# Each has an option ATTN_WITH_<NAME>: AUTO (use it if found), ON (fail if it is missing), OFF (ignore it).
# What is found becomes a target attn_<NAME> to link, and ATTN_HAVE_<NAME>=1 for the program; `attn info`
# tells the user which are missing and which Debian package brings them.

add_library(attn_optional INTERFACE)

# attn_find(NAME header library package why)    library "" for packages that are headers only; the header may
# lie in a folder named as the library
function(attn_find name header library package why)
    set(ATTN_WITH_${name} AUTO CACHE STRING "${why}: AUTO, ON or OFF")
    set_property(CACHE ATTN_WITH_${name} PROPERTY STRINGS AUTO ON OFF)
    if(ATTN_WITH_${name} STREQUAL "OFF")
        message(STATUS "${name}: off (${why})")
        return()
    endif()
    find_path(ATTN_${name}_INCLUDE ${header} PATH_SUFFIXES ${library})
    mark_as_advanced(ATTN_${name}_INCLUDE)
    set(found ${ATTN_${name}_INCLUDE})
    if(library)
        find_library(ATTN_${name}_LIBRARY ${library})
        mark_as_advanced(ATTN_${name}_LIBRARY)
        if(NOT ATTN_${name}_LIBRARY)
            set(found OFF)
        endif()
    endif()
    if(found)
        message(STATUS "${name}: found (${why})")
        add_library(attn_${name} INTERFACE)
        target_include_directories(attn_${name} SYSTEM INTERFACE ${ATTN_${name}_INCLUDE})
        if(library)
            target_link_libraries(attn_${name} INTERFACE ${ATTN_${name}_LIBRARY})
        endif()
        target_compile_definitions(attn_optional INTERFACE ATTN_HAVE_${name}=1)
    elseif(ATTN_WITH_${name} STREQUAL "AUTO")
        message(STATUS "${name}: missing (${why}; Debian package ${package})")
    else()
        message(FATAL_ERROR "${name} is missing (${why}): install ${package} or set ATTN_WITH_${name}=OFF")
    endif()
endfunction()

attn_find(CAIRO cairo.h cairo libcairo2-dev "pictures as PNG")
attn_find(RANDOM123 Random123/philox.h "" librandom123-dev "random inputs, the same on every machine")
attn_find(OPENBLAS cblas.h openblas libopenblas-dev "the bench's naive attention, loaded when it runs")
attn_find(CMOCKA cmocka.h cmocka libcmocka-dev "unit tests")

foreach(name IN ITEMS CAIRO RANDOM123) # what the program itself calls
    if(TARGET attn_${name})
        target_link_libraries(attn_optional INTERFACE attn_${name})
    endif()
endforeach()
if(TARGET attn_OPENBLAS)
    # The program loads it when the contestant naive runs: linked, it would start a thread a core in every run.
    target_include_directories(attn_optional SYSTEM INTERFACE ${ATTN_OPENBLAS_INCLUDE})
    target_link_libraries(attn_optional INTERFACE ${CMAKE_DL_LIBS})
endif()
