# SPDX-License-Identifier: Apache-2.0
#
# Toolchain: 64-bit ARM Linux from another machine, by Debian's gcc-aarch64-linux-gnu; programs run under
# qemu-user.  They are static: with a shared C library a child of fork() loops for ever under qemu-user 7.2, in
# the list of threads that the library then goes through.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
