/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - one table, five formats, a row at a time.
 *
 * People (table, md) get rounded numbers and units; programs (csv, json, jsonl) get plain numbers with all
 * their digits.  A missing cell is "-", empty or null.  Rows are flushed, so that a sweep that is stopped
 * has told what it found.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static bool is_json(const cli_table *table)
{
    return table->out->format == CLI_FORMAT_JSON || table->out->format == CLI_FORMAT_JSONL;
}

static int column_width(const cli_column *column)
{
    int title = (int)strlen(column->title);
    int width = column->width > 0 ? column->width : 8;
    return title > width ? title : width;
}

/* csv quotes what holds a comma, a quote or a line break (RFC 4180). */
static void write_csv(FILE *file, const char *text)
{
    if (strpbrk(text, ",\"\r\n") == NULL) {
        fputs(text, file);
        return;
    }
    fputc('"', file);
    for (; *text != '\0'; text++) {
        fputs(*text == '"' ? "\"\"" : "", file);
        if (*text != '"') {
            fputc(*text, file);
        }
    }
    fputc('"', file);
}

/* In Markdown a bar would end the cell. */
static void write_md(FILE *file, const char *text)
{
    for (; *text != '\0'; text++) {
        fputs(*text == '|' ? "\\" : "", file);
        fputc(*text == '\n' ? ' ' : *text, file);
    }
}

/* Text stands left, numbers right; the last column is not padded. */
static void write_aligned(FILE *file, const cli_table *table, int index, const char *text)
{
    const cli_column *column = &table->columns[index];
    int width = column_width(column);
    bool last = index == table->count - 1;
    fputs(index > 0 ? "  " : "", file);
    if (column->kind != CLI_CELL_TEXT) {
        fprintf(file, "%*s", width, text);
    } else {
        fprintf(file, "%-*s", last ? 0 : width, text);
    }
}

/* One cell, or one title, in the formats that are not JSON. */
static void write_cell(const cli_table *table, int index, const char *text)
{
    FILE *file = table->out->file;
    bool last = index == table->count - 1;
    switch (table->out->format) {
    case CLI_FORMAT_MD:
        fputs("| ", file);
        write_md(file, text);
        fputs(last ? " |\n" : " ", file);
        break;
    case CLI_FORMAT_CSV:
        fputs(index > 0 ? "," : "", file);
        write_csv(file, text);
        fputs(last ? "\n" : "", file);
        break;
    case CLI_FORMAT_TABLE:
    case CLI_FORMAT_JSON:
    case CLI_FORMAT_JSONL:
        write_aligned(file, table, index, text);
        fputs(last ? "\n" : "", file);
        break;
    }
}

static void write_rule(const cli_table *table)
{
    FILE *file = table->out->file;
    for (int i = 0; i < table->count; i++) {
        bool text = table->columns[i].kind == CLI_CELL_TEXT;
        if (table->out->format == CLI_FORMAT_MD) {
            fputs(text ? "|---" : "|--:", file);
            continue;
        }
        fputs(i > 0 ? "  " : "", file);
        for (int j = column_width(&table->columns[i]); j > 0; j--) {
            fputc('-', file);
        }
    }
    fputs(table->out->format == CLI_FORMAT_MD ? "|\n" : "\n", file);
}

void cli_table_begin(cli_table *table, cli_out *out, const char *name, const cli_column *columns, int count)
{
    table->out = out;
    table->columns = columns;
    table->count = count;
    table->next = 0;
    table->document = false;
    if (out->format == CLI_FORMAT_JSON) {
        table->document = out->json.depth == 0;
        if (table->document) {
            cli_json_object(&out->json, NULL);
            cli_json_int(&out->json, "schema_version", CLI_SCHEMA_VERSION);
        }
        cli_json_array(&out->json, name);
    } else if (out->format != CLI_FORMAT_JSONL) {
        for (int i = 0; i < count; i++) {
            write_cell(table, i, out->format == CLI_FORMAT_CSV ? columns[i].key : columns[i].title);
        }
        if (out->format != CLI_FORMAT_CSV) {
            write_rule(table);
        }
    }
}

/* Opens the row's object at its first cell. */
static const char *begin_cell(cli_table *table)
{
    if (table->next == 0 && is_json(table)) {
        cli_json_object(&table->out->json, NULL);
    }
    return table->columns[table->next].key;
}

static void end_cell(cli_table *table)
{
    table->next++;
    if (table->next == table->count) {
        table->next = 0;
        if (is_json(table)) {
            cli_json_end(&table->out->json);
        }
        fflush(table->out->file);
    }
}

void cli_table_text(cli_table *table, const char *value)
{
    if (value == NULL) {
        cli_table_missing(table);
        return;
    }
    const char *key = begin_cell(table);
    if (is_json(table)) {
        cli_json_text(&table->out->json, key, value);
    } else {
        write_cell(table, table->next, value);
    }
    end_cell(table);
}

void cli_table_missing(cli_table *table)
{
    const char *key = begin_cell(table);
    if (is_json(table)) {
        cli_json_null(&table->out->json, key);
    } else {
        write_cell(table, table->next, table->out->format == CLI_FORMAT_CSV ? "" : "-");
    }
    end_cell(table);
}

void cli_table_int(cli_table *table, int64_t value)
{
    const char *key = begin_cell(table);
    cli_cell kind = table->columns[table->next].kind;
    char text[CLI_NUMBER];
    if (is_json(table) && kind == CLI_CELL_BOOL) {
        cli_json_bool(&table->out->json, key, value != 0);
    } else if (is_json(table)) {
        cli_json_int(&table->out->json, key, value);
    } else if (kind == CLI_CELL_BOOL) {
        write_cell(table, table->next, value != 0 ? "yes" : "no");
    } else if (kind == CLI_CELL_BYTES && table->out->format != CLI_FORMAT_CSV) {
        write_cell(table, table->next, cli_bytes(text, (double)value));
    } else {
        snprintf(text, sizeof(text), "%" PRId64, value);
        write_cell(table, table->next, text);
    }
    end_cell(table);
}

void cli_table_real(cli_table *table, double value)
{
    if (!isfinite(value)) {
        cli_table_missing(table);
        return;
    }
    const char *key = begin_cell(table);
    const cli_column *column = &table->columns[table->next];
    char text[400];
    if (is_json(table)) {
        cli_json_real(&table->out->json, key, value);
    } else if (table->out->format == CLI_FORMAT_CSV) {
        snprintf(text, sizeof(text), "%.9g", value);
        write_cell(table, table->next, text);
    } else if (column->kind == CLI_CELL_BYTES) {
        write_cell(table, table->next, cli_bytes(text, value));
    } else {
        bool tiny = value != 0 && fabs(value) < 0.5 * pow(10, -column->precision);
        snprintf(text, sizeof(text), tiny || fabs(value) >= 1e15 ? "%.*e" : "%.*f", column->precision, value);
        write_cell(table, table->next, text);
    }
    end_cell(table);
}

void cli_table_known(cli_table *table, bool known, double value)
{
    cli_table_real(table, known ? value : (double)NAN);
}

void cli_table_end(cli_table *table)
{
    if (table->out->format == CLI_FORMAT_JSON) {
        cli_json_end(&table->out->json);
        if (table->document) {
            cli_json_end(&table->out->json);
        }
    }
    fflush(table->out->file);
}
