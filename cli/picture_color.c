/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture_color.c - one colour a worker, told apart also by the colour-blind.
 *
 * Workers 0 to 7 have the eight colours of Okabe and Ito ("Color Universal Design", 2008), with a dark grey
 * for their black.  Worker w has colour w mod 8 and hatch (w / 8) mod 4: none, rising, falling, both; the
 * lightness of its colour in Oklab (Ottosson 2020), a space where equal steps look equal, is moved by step
 * (w / 32) mod 3: as it is, lighter, darker.  So 96 workers differ; beyond, looks repeat.  Worker w looks the
 * same in every picture.
 */
#include <math.h>

#include "picture.h"

const picture_color picture_masked = {0xe4, 0xe4, 0xe4};
const picture_color picture_ink = {0x20, 0x20, 0x20};
const picture_color picture_paper = {0xff, 0xff, 0xff};

static const picture_color okabe_ito[8] = {
    {0xe6, 0x9f, 0x00}, /* orange */
    {0x56, 0xb4, 0xe9}, /* sky blue */
    {0x00, 0x9e, 0x73}, /* bluish green */
    {0xf0, 0xe4, 0x42}, /* yellow */
    {0x00, 0x72, 0xb2}, /* blue */
    {0xd5, 0x5e, 0x00}, /* vermilion */
    {0xcc, 0x79, 0xa7}, /* reddish purple */
    {0x4d, 0x4d, 0x4d}, /* grey for black */
};

/* The sRGB transfer function and its inverse (IEC 61966-2-1). */
static double to_linear(uint8_t value)
{
    double x = value / 255.0;
    return x <= 0.04045 ? x / 12.92 : pow((x + 0.055) / 1.055, 2.4);
}

static uint8_t from_linear(double x)
{
    x = x < 0 ? 0 : x > 1 ? 1 : x;
    x = x <= 0.0031308 ? 12.92 * x : 1.055 * pow(x, 1 / 2.4) - 0.055;
    return (uint8_t)(255 * x + 0.5);
}

static double product(const double row[3], const double column[3])
{
    return row[0] * column[0] + row[1] * column[1] + row[2] * column[2];
}

/* The colour with its lightness L of Oklab moved a share of the way to `target`. */
static picture_color move_lightness(picture_color color, double target, double share)
{
    static const double to_lms[3][3] = {{0.4122214708, 0.5363325363, 0.0514459929},
                                        {0.2119034982, 0.6806995451, 0.1073969566},
                                        {0.0883024619, 0.2817188376, 0.6299787005}};
    static const double to_lab[3][3] = {{0.2104542553, 0.7936177850, -0.0040720468},
                                        {1.9779984951, -2.4285922050, 0.4505937099},
                                        {0.0259040371, 0.7827717662, -0.8086757660}};
    static const double from_lab[3][3] = {{1, 0.3963377774, 0.2158037573},
                                          {1, -0.1055613458, -0.0638541728},
                                          {1, -0.0894841775, -1.2914855480}};
    static const double from_lms[3][3] = {{4.0767416621, -3.3077115913, 0.2309699292},
                                          {-1.2684380046, 2.6097574011, -0.3413193965},
                                          {-0.0041960863, -0.7034186147, 1.7076147010}};
    double rgb[3] = {to_linear(color.red), to_linear(color.green), to_linear(color.blue)}, lms[3], lab[3];
    for (int i = 0; i < 3; i++) {
        lms[i] = cbrt(product(to_lms[i], rgb));
    }
    for (int i = 0; i < 3; i++) {
        lab[i] = product(to_lab[i], lms);
    }
    lab[0] += share * (target - lab[0]);
    for (int i = 0; i < 3; i++) {
        double root = product(from_lab[i], lab);
        lms[i] = root * root * root;
    }
    return (picture_color){from_linear(product(from_lms[0], lms)), from_linear(product(from_lms[1], lms)),
                           from_linear(product(from_lms[2], lms))};
}

picture_color picture_rank_color(int64_t rank)
{
    picture_color color = okabe_ito[rank % 8];
    switch (rank / 32 % 3) {
    case 1:
        return move_lightness(color, 1, 0.55);
    case 2:
        return move_lightness(color, 0, 0.40);
    default:
        return color;
    }
}

int picture_rank_hatch(int64_t rank)
{
    return (int)(rank / 8 % PICTURE_HATCHES);
}

/* Relative luminance against the point where black and white text have the same contrast (WCAG 2). */
bool picture_is_light(picture_color color)
{
    return 0.2126 * to_linear(color.red) + 0.7152 * to_linear(color.green) + 0.0722 * to_linear(color.blue) >
           0.179;
}
