/* Edge coverage for code compiled with gcc's -fsanitize-coverage=trace-pc,trace-cmp.
 *
 * Such code calls __sanitizer_cov_trace_pc() at every branch target, and others of
 * that name at every comparison. This file is those functions, as a small shared
 * library to LD_PRELOAD, and a few calls for the fuzz driver. An edge is (where we are, where we were), hashed into a map of
 * counters; counts matter by power of two only, so that a loop taken 5 or 6 times is
 * one behaviour, and 100 times another.
 *
 * Constants that the code compares with are learned: a magic number or a limit is what
 * an input has to hit, and chance would take long to.
 *
 * Addresses are taken relative to the module they lie in: where the loader put it
 * changes from run to run, and a seed must give the same run again.
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <string.h>

#define MAP_SIZE (1u << 16)
#define MAX_MODULES 64
#define MAX_CONSTANTS 512
#define CONSTANT_SLOTS (4 * MAX_CONSTANTS) /* sparse, so that a probe ends soon */

struct module {
    uintptr_t low, high;
    uint32_t salt; /* from the file's name: two modules do not share edges */
};

static uint8_t counts[MAP_SIZE]; /* of this run */
static uint8_t seen[MAP_SIZE];   /* of all runs: one bit per bucket of the count */
static struct module modules[MAX_MODULES];
static unsigned module_count;
static struct module *current;
static int recording;
static uint64_t slots[CONSTANT_SLOTS]; /* a set of constants; 0 is an empty slot */

uint64_t coverage_constants[MAX_CONSTANTS]; /* the same, in the order they came */
unsigned coverage_constant_count;
static __thread uint32_t previous;

static uint32_t name_hash(const char *path) {
    const char *slash = strrchr(path, '/');
    uint32_t hash = 2166136261u;
    for (const char *c = slash ? slash + 1 : path; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    return hash;
}

static int remember(struct dl_phdr_info *info, size_t size, void *wanted) {
    uintptr_t pc = *(uintptr_t *)wanted;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t low = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && pc >= low && pc < low + part->p_memsz) {
            modules[module_count] =
                (struct module){low, low + part->p_memsz, name_hash(info->dlpi_name)};
            return 1;
        }
    }
    return 0;
}

static struct module *module_of(uintptr_t pc) {
    for (unsigned i = 0; i < module_count; i++)
        if (pc >= modules[i].low && pc < modules[i].high)
            return &modules[i];
    if (module_count == MAX_MODULES || !dl_iterate_phdr(remember, &pc))
        return 0;
    return &modules[module_count++];
}

void __sanitizer_cov_trace_pc(void) {
    if (!recording)
        return;
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    if (!current || pc < current->low || pc >= current->high) {
        current = module_of(pc);
        if (!current)
            return;
    }
    uint32_t place = ((uint32_t)(pc - current->low) ^ current->salt) * 2654435761u >> 16;
    uint8_t *count = &counts[(place ^ previous) & (MAP_SIZE - 1)];
    *count += *count != 255;
    previous = place >> 1;
}

static void learn(uint64_t value) {
    if (!recording || !value || coverage_constant_count == MAX_CONSTANTS)
        return;
    unsigned slot = (unsigned)(value * 11400714819323198485u >> 32) % CONSTANT_SLOTS;
    while (slots[slot] && slots[slot] != value)
        slot = (slot + 1) % CONSTANT_SLOTS;
    if (slots[slot])
        return;
    slots[slot] = value;
    coverage_constants[coverage_constant_count++] = value;
}

void __sanitizer_cov_trace_const_cmp1(uint8_t constant, uint8_t other) { (void)other; learn(constant); }
void __sanitizer_cov_trace_const_cmp2(uint16_t constant, uint16_t other) { (void)other; learn(constant); }
void __sanitizer_cov_trace_const_cmp4(uint32_t constant, uint32_t other) { (void)other; learn(constant); }
void __sanitizer_cov_trace_const_cmp8(uint64_t constant, uint64_t other) { (void)other; learn(constant); }

/* cases[0] holds how many, cases[1] their width, the rest the values. */
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t *cases) {
    (void)value;
    for (uint64_t i = 0; i < cases[0]; i++)
        learn(cases[2 + i]);
}

/* Two variables compared: nothing to learn that would be the same next time. */
void __sanitizer_cov_trace_cmp1(uint8_t a, uint8_t b) { (void)a; (void)b; }
void __sanitizer_cov_trace_cmp2(uint16_t a, uint16_t b) { (void)a; (void)b; }
void __sanitizer_cov_trace_cmp4(uint32_t a, uint32_t b) { (void)a; (void)b; }
void __sanitizer_cov_trace_cmp8(uint64_t a, uint64_t b) { (void)a; (void)b; }
void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a; (void)b; }
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a; (void)b; }

/* 1, 2, 3, 4-7, 8-15, 16-31, 32-127, 128 and more: one bit each. */
static uint8_t bucket(uint8_t count) {
    if (count <= 3)
        return 1u << (count - 1);
    if (count < 8)
        return 8;
    if (count < 16)
        return 16;
    if (count < 32)
        return 32;
    return count < 128 ? 64 : 128;
}

void coverage_start(void) {
    memset(counts, 0, MAP_SIZE);
    previous = 0;
    recording = 1;
}

/* Stops, and says how many (edge, bucket) pairs no earlier run had. */
unsigned coverage_stop(void) {
    unsigned fresh = 0;
    recording = 0;
    for (unsigned i = 0; i < MAP_SIZE; i += 8) {
        uint64_t eight;
        memcpy(&eight, counts + i, 8);
        if (!eight)
            continue;
        for (unsigned j = i; j < i + 8; j++) {
            uint8_t bit = counts[j] ? bucket(counts[j]) : 0;
            fresh += bit && !(seen[j] & bit);
            seen[j] |= bit;
        }
    }
    return fresh;
}

unsigned coverage_edges(void) {
    unsigned edges = 0;
    for (unsigned i = 0; i < MAP_SIZE; i++)
        edges += seen[i] != 0;
    return edges;
}
