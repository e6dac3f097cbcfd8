/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.c - one progress bar on stderr with the time left.
 *
 * Time left = (time so far) * (work left) / (work done), where work that a spool had finished before does not
 * count as done in this time.  Drawn at most 10 times a second; a bar in eighths of a character where the
 * locale is UTF-8, in # and . elsewhere.
 */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

#define BAR 24

double cli_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void cli_progress_begin(cli_progress *progress, const cli_common *common, const char *label, double total)
{
    memset(progress, 0, sizeof(*progress));
    progress->on = common->progress == CLI_ALWAYS || (common->progress == CLI_AUTO && isatty(STDERR_FILENO));
    progress->utf8 = cli_utf8();
    progress->label = label;
    progress->total = total;
    progress->begin = cli_now();
    progress->drawn = progress->begin - 1;
}

static void draw_bar(double share, bool utf8)
{
    static const char *const eighths[] = {" ",      "\u258f", "\u258e", "\u258d",
                                          "\u258c", "\u258b", "\u258a", "\u2589"};
    int parts = (int)(share * BAR * 8);
    for (int i = 0; i < BAR; i++) {
        int here = parts - 8 * i;
        if (utf8) {
            fputs(here >= 8 ? "\u2588" : here <= 0 ? " " : eighths[here], stderr);
        } else {
            fputc(here >= 8 ? '#' : '.', stderr);
        }
    }
}

static void draw(cli_progress *progress, double now)
{
    char left[CLI_NUMBER];
    double spent = now - progress->begin, worked = progress->done - progress->skipped;
    fprintf(stderr, "\r%s ", progress->label);
    if (progress->total <= 0) {
        fprintf(stderr, "%s\033[K", cli_seconds(left, spent));
    } else {
        double share = progress->done / progress->total;
        share = share < 0 ? 0 : share > 1 ? 1 : share;
        fputc('[', stderr);
        draw_bar(share, progress->utf8);
        fprintf(stderr, "] %3d %%", (int)(100 * share));
        if (worked > 0 && spent > 0.5) {
            fprintf(stderr, ", %s left", cli_seconds(left, spent * progress->total * (1 - share) / worked));
        }
        fputs("\033[K", stderr); /* clears what a longer line left behind */
    }
    fflush(stderr);
    progress->drawn = now;
}

static void update(cli_progress *progress, double amount)
{
    progress->done += amount;
    double now = progress->on ? cli_now() : 0;
    if (progress->on && now - progress->drawn >= 0.1) {
        draw(progress, now);
    }
}

void cli_progress_add(cli_progress *progress, double amount)
{
    update(progress, amount);
}

void cli_progress_skip(cli_progress *progress, double amount)
{
    progress->skipped += amount;
    update(progress, amount);
}

void cli_progress_hide(cli_progress *progress)
{
    if (progress->on && progress->drawn >= progress->begin) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        progress->drawn = progress->begin - 1;
    }
}

void cli_progress_end(cli_progress *progress)
{
    cli_progress_hide(progress);
    progress->on = false;
}
