/* SPDX-License-Identifier: Apache-2.0 */
/* header_alone.c - a public header (ATTN_HEADER) compiles alone as C11, and its macros work. */
#include ATTN_HEADER

int main(void)
{
    attn_problem problem = ATTN_INIT(attn_problem);
    return problem.size == sizeof problem && problem.batch == 0 && attn_version()[0] != '\0' ? 0 : 1;
}
