/* SPDX-License-Identifier: Apache-2.0 */
/* kernel.cpp - compiled once for each .cu file, which the build names: its kernels for machine.h. */
#include "machine.h"

#include MACHINE_SOURCE
