#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# format.sh - every C file is laid out as .clang-format says.
#
# usage: format.sh SOURCE-FOLDER
exec "$1/script/check-format"
