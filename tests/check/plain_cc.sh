#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# plain_cc.sh - the library compiles by one plain cc command.
#
# usage: plain_cc.sh SOURCE-FOLDER CC
exec "$1/script/check-plain-cc" "$2"
