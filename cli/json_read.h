/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json_read.h - a strict JSON reader (RFC 8259) over a part of a file, a small window at a time.
 *
 * It pulls: the caller asks for what it expects and gets false if something else stands there, with the
 * reason in cli_json_in.why and the place in cli_json_where().  The first failure sticks.  Memory does not
 * depend on the text.
 */
#ifndef ATTN_CLI_JSON_READ_H
#define ATTN_CLI_JSON_READ_H

#include "bytes.h"

typedef struct cli_json_in {
    const cli_reader *reader;
    int64_t end;        /* of the text in the file */
    int64_t next;       /* first byte of the file behind the window */
    int at, filled;     /* of the window */
    attn_status status; /* ATTN_OK, or ATTN_EIO: the file could not be read */
    const char *why;    /* NULL as long as all is well; static text */
    char window[4096];
} cli_json_in;

void cli_json_in_begin(cli_json_in *in, const cli_reader *reader, int64_t begin, int64_t end);
/* File position of the next byte. */
int64_t cli_json_where(const cli_json_in *in);
/* Sets the reason if there is none yet; returns false. */
bool cli_json_fail(cli_json_in *in, const char *why);

/* Takes the punctuation character c after white space, if it stands there: no failure otherwise. */
bool cli_json_accept(cli_json_in *in, char c);
/* Likewise, but failure if it does not. */
bool cli_json_expect(cli_json_in *in, char c);
/* Between the members of an object or array: true as long as one follows, taking the comma in front of it
 * (except before the first) or the closing bracket.  *first begins as true.  Ends with false, also on
 * failure. */
bool cli_json_more(cli_json_in *in, char close, bool *first);
/* A string, decoded to UTF-8 and terminated; text NULL: checked and dropped. */
bool cli_json_in_text(cli_json_in *in, char *text, size_t capacity);
/* A number that is an integer in 0..2^63-1: no sign, fraction or exponent. */
bool cli_json_in_count(cli_json_in *in, int64_t *value);
/* Any value, nested at most `depth` deep. */
bool cli_json_skip(cli_json_in *in, int depth);
/* Nothing but white space is left. */
bool cli_json_done(cli_json_in *in);

#endif
