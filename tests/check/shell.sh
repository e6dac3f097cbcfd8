#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# shell.sh - shellcheck finds nothing in the scripts.
#
# usage: shell.sh SOURCE-FOLDER
exec "$1/script/check-shell"
