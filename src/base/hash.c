/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hash.c - a 64-bit hash of a byte stream, for checksums of files and fingerprints of plans.
 *
 * Four independent lanes of multiply and rotate (so that the multiplier's latency does not bound the speed)
 * over 32 bytes at a time, folded with the length by a final avalanche.  Chaining calls hashes the pieces as
 * a list: the cut between the pieces matters.  Little-endian input order is part of the spool format.
 */
#include <string.h>

#include "base/base.h"

#define ODD1 0x9e3779b97f4a7c15u /* 2^64 / golden ratio */
#define ODD2 0xd6e8feb86659fd93u

static uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static uint64_t mix(uint64_t lane, uint64_t word)
{
    return rotate((lane ^ word) * ODD1, 29) * ODD2;
}

static uint64_t word_at(const unsigned char *bytes, size_t count)
{
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) {
        word |= (uint64_t)bytes[i] << 8 * i;
    }
    return word;
}

static uint64_t avalanche(uint64_t x)
{
    x = (x ^ x >> 32) * ODD1;
    x = (x ^ x >> 29) * ODD2;
    return x ^ x >> 32;
}

uint64_t attn__hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    uint64_t lanes[4] = {hash, hash ^ ODD1, hash ^ ODD2, hash + ODD1};
    size_t left = bytes;
    for (; left >= 32; left -= 32, at += 32) {
        for (int i = 0; i < 4; i++) {
            lanes[i] = mix(lanes[i], word_at(at + 8 * i, 8));
        }
    }
    for (int i = 0; left > 0; i = (i + 1) % 4) {
        size_t take = left < 8 ? left : 8;
        lanes[i] = mix(lanes[i], word_at(at, take));
        at += take;
        left -= take;
    }
    uint64_t sum = bytes * ODD2;
    for (int i = 0; i < 4; i++) {
        sum = mix(sum, avalanche(lanes[i]));
    }
    return avalanche(sum);
}
