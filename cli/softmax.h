/* SPDX-License-Identifier: Apache-2.0 */
/* softmax.h - rows of the score matrix, for the contestant naive. */
#ifndef ATTN_CLI_SOFTMAX_H
#define ATTN_CLI_SOFTMAX_H

#include <stdint.h>

/* Softmax of s[0..seen) in place, zeros behind it up to n; seen >= 1.  Returns lse. */
float cli_softmax_row(float *s, int64_t seen, int64_t n);

/* dS = P * (dP - D) in place of dP, where D is the row's sum of P * dP. */
void cli_softmax_slope(float *dp, const float *weight, int64_t n);

#endif
