#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs.sh - links lead somewhere, and the README's C is the first example.
#
# usage: docs.sh SOURCE-FOLDER
exec "$1/script/check-docs"
