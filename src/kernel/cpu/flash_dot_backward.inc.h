/* SPDX-License-Identifier: Apache-2.0 */
/* flash_dot_backward.inc.h - the second half of flash_dot.inc.h, which includes it: no gradients. */
