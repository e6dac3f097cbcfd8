#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sources.sh - every source file is in the build and has its head.
#
# usage: sources.sh SOURCE-FOLDER
exec "$1/script/check-sources"
