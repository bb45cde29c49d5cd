/* Reading a plan from standard input; plan.h describes its form. */
#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Bytes read_bytes(size_t size) {
    Bytes bytes = {malloc(size + 1), size};
    if (!bytes.data || fread(bytes.data, 1, size, stdin) != size)
        fail("the plan ends inside %zu bytes", size);
    return bytes;
}

static void end_line(void) {
    if (fgetc(stdin) != '\n')
        fail("a plan line is longer than it should be");
}

static Party read_party(const Party *before) {
    Party party = {.socket = -1};
    size_t hello, then, until, stream;
    if (scanf("%d %zu %zu", &party.port, &hello, &party.skip) != 3
        || scanf("%zu %zu %zu", &then, &until, &stream) != 3)
        fail("a party needs six numbers");
    end_line();
    party.hello = read_bytes(hello);
    party.then = read_bytes(then);
    party.until = read_bytes(until);
    party.stream = stream || !before ? read_bytes(stream) : before->stream;
    return party;
}

static void add_party(Party *parties, int *count) {
    if (*count == MAX_PARTIES)
        fail("more than %d parties", MAX_PARTIES);
    parties[*count] = read_party(*count ? &parties[*count - 1] : NULL);
    ++*count;
}

static int read_setting(Plan *plan, const char *word) {
    if (!strcmp(word, "mode"))
        return scanf("%15s", plan->mode) == 1;
    if (!strcmp(word, "cycles"))
        return scanf("%ld", &plan->cycles) == 1;
    if (!strcmp(word, "warmup"))
        return scanf("%ld", &plan->warmup) == 1;
    if (!strcmp(word, "seconds"))
        return scanf("%lf", &plan->seconds) == 1;
    if (!strcmp(word, "bytes_per_s"))
        return scanf("%lf", &plan->bytes_per_s) == 1;
    if (!strcmp(word, "frame"))
        return scanf("%zu %zu %zu", &plan->frame_out, &plan->frame_in, &plan->tag) == 3;
    if (!strcmp(word, "answers"))
        return scanf("%ld %15s %15s", &plan->answers, plan->good, plan->bad) == 3;
    if (!strcmp(word, "numbered"))
        return scanf("%zu %zu %zu %ld", &plan->number_at, &plan->answer_size, &plan->answer_at,
                     &plan->answer_more) == 4;
    return 0;
}

static Bytes read_sized(const char *word) {
    size_t size;
    if (scanf("%zu", &size) != 1)
        fail("%s needs its length", word);
    end_line();
    return read_bytes(size);
}

void read_plan(Plan *plan) {
    char word[16];
    while (scanf("%15s", word) == 1) {
        if (!strcmp(word, "publisher")) {
            add_party(plan->publishers, &plan->publisher_count);
        } else if (!strcmp(word, "subscriber")) {
            add_party(plan->subscribers, &plan->subscriber_count);
        } else if (!strcmp(word, "aside")) {
            plan->aside = read_sized(word);
        } else if (!strcmp(word, "beginning")) {
            plan->beginning = read_sized(word);
        } else if (!read_setting(plan, word)) {
            fail("unknown or incomplete plan line: %s", word);
        }
    }
}
