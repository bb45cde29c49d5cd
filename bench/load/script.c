/* Reading a dialogue from standard input; dialogue.h describes its form. */
#include "dialogue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Bytes read_bytes(size_t size) {
    Bytes bytes = {malloc(size + 1), size};
    if (!bytes.data || fread(bytes.data, 1, size, stdin) != size)
        fail("the dialogue ends inside %zu bytes", size);
    return bytes;
}

static void end_line(void) {
    if (fgetc(stdin) != '\n')
        fail("a line of the dialogue is longer than it should be");
}

static Counters read_counters(size_t size) {
    Counters counters;
    if (scanf("%d", &counters.count) != 1 || counters.count < 0 || counters.count > MAX_COUNTERS)
        fail("at most %d counters", MAX_COUNTERS);
    for (int i = 0; i < counters.count; ++i) {
        Counter *one = &counters.each[i];
        if (scanf("%zu %zu %llu", &one->offset, &one->width, &one->first) != 3
            || one->width > sizeof one->first || one->offset + one->width > size)
            fail("a counter needs a place and a first value");
    }
    end_line();
    return counters;
}

static void read_step(Dialogue *dialogue, int sends) {
    Step step = {.sends = sends};
    if (!dialogue->voice_count)
        fail("a step belongs to a voice");
    Voice *voice = &dialogue->voices[dialogue->voice_count - 1];
    if (voice->count == MAX_STEPS)
        fail("a voice takes at most %d steps", MAX_STEPS);
    if (scanf("%d %zu", &step.socket, &step.bytes.size) != 2)
        fail("a step needs a socket and a size");
    step.counters = read_counters(step.bytes.size);
    step.bytes = read_bytes(step.bytes.size);
    voice->steps[voice->count++] = step;
}

static void read_channel(Dialogue *dialogue) {
    Channel channel = {0};
    if (dialogue->channel_count == CHANNELS)
        fail("more than %d channels", CHANNELS);
    if (scanf("%d %ld", &channel.socket, &channel.messages) != 2 || channel.messages < 1
        || scanf("%zu %zu", &channel.requests.size, &channel.answers.size) != 2)
        fail("a channel needs a socket and three numbers");
    channel.counters = read_counters(channel.answers.size / (size_t)channel.messages);
    channel.requests = read_bytes(channel.requests.size);
    channel.answers = read_bytes(channel.answers.size);
    dialogue->channels[dialogue->channel_count++] = channel;
}

static int read_line(Dialogue *dialogue, const char *word) {
    if (!strcmp(word, "mode"))
        return scanf("%15s", dialogue->mode) == 1;
    if (!strcmp(word, "count"))
        return scanf("%ld", &dialogue->count) == 1;
    if (!strcmp(word, "warmup"))
        return scanf("%ld", &dialogue->warmup) == 1;
    if (!strcmp(word, "ahead"))
        return scanf("%ld", &dialogue->ahead) == 1;
    if (!strcmp(word, "voice"))
        return dialogue->voice_count++ < MAX_VOICES;
    if (!strcmp(word, "channel"))
        read_channel(dialogue);
    else if (!strcmp(word, "send") || !strcmp(word, "expect"))
        read_step(dialogue, *word == 's');
    else
        return 0;
    return 1;
}

void read_dialogue(Dialogue *dialogue) {
    char word[16];
    while (scanf("%15s", word) == 1)
        if (!read_line(dialogue, word))
            fail("unknown or incomplete line of the dialogue: %s", word);
}
