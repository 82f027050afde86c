/* Memory between protected pages. It finds out whether a library accesses memory outside of its arguments.
 *
 * Preloaded (LD_PRELOAD). While armed, every block that is allocated lies in a run of pages of its own that ends, or begins, at a
 * page without permissions; what the alignment leaves between block and page is filled and looked at when the block is freed. A
 * freed block becomes such a page again. A fault is written down, and ends the process with status 77.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096ul
#define ARENA (1ul << 44)
#define SLOTS (1u << 18)
#define FILL 0xA5
#define FAULT 77

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct block {
    char *at, *pages;
    size_t size, length;
};

static struct block blocks[SLOTS];
static char *arena, *next_page;
static volatile int lock;
static char *report;
static size_t report_size, limit = 1ul << 31;

/* The variables that the Python side sets and reads. */
int guard_armed;
int guard_all;          /* guard every block, not only those that are requested with an alignment, as the memory of tensors is */
size_t guard_exact;   /* alignment of the next blocks; 0: the requested one */
int guard_at_start;   /* blocks begin at the protected page instead of ending there */
size_t guard_refused; /* the largest block that was refused */
size_t guard_spoilt;  /* changed bytes next to blocks */
size_t guard_slack;   /* bytes behind each block that may be read */

static void take(void) {
    while (__sync_lock_test_and_set(&lock, 1)) {
    }
}
static void leave(void) { __sync_lock_release(&lock); }

static int ours(const void *p) { return arena && (char *)p >= arena && (char *)p < arena + ARENA; }

static struct block *find(const char *at) {
    unsigned k = (unsigned)(((uintptr_t)at >> 4) * 2654435761u) % SLOTS;
    for (unsigned n = 0; n < SLOTS; n++, k = (k + 1) % SLOTS) {
        if (blocks[k].at == at) return &blocks[k];
        if (!blocks[k].at) return NULL;
    }
    return NULL;
}

static struct block *place(char *at) { /* addresses are never reused, so the entry of any freed block can be taken */
    unsigned k = (unsigned)(((uintptr_t)at >> 4) * 2654435761u) % SLOTS;
    for (unsigned n = 0; n < SLOTS; n++, k = (k + 1) % SLOTS)
        if (!blocks[k].at || !blocks[k].length) return &blocks[k];
    return NULL;
}

static void *guarded(size_t align, size_t size) {
    if (size > limit) {
        if (size > guard_refused) guard_refused = size;
        errno = ENOMEM;
        return NULL;
    }
    if (guard_exact) align = guard_exact;
    size_t whole = size + guard_slack, length = (whole + PAGE - 1) / PAGE * PAGE;
    if (!length) length = PAGE;
    take();
    char *pages = next_page;
    if (pages + length + 2 * PAGE > arena + ARENA) _exit(78);
    next_page += length + PAGE;
    char *at = guard_at_start ? pages : (char *)((uintptr_t)(pages + length - whole) / align * align);
    struct block *b = place(at);
    if (!b) _exit(79);
    b->at = at, b->pages = pages, b->size = size, b->length = length;
    leave();
    if (mprotect(pages, length, PROT_READ | PROT_WRITE)) _exit(80);
    memset(pages, FILL, (size_t)(at - pages));
    memset(at + size, FILL, (size_t)(pages + length - at) - size);
    return at;
}

static void release(char *p) {
    take();
    struct block *b = find(p);
    if (!b || !b->length) { /* freed twice, or never allocated */
        if (report) snprintf(report, report_size, "free of an unknown block");
        _exit(FAULT);
    }
    struct block was = *b;
    b->length = 0;
    leave();
    for (char *c = was.pages; c < was.at; c++) guard_spoilt += *(unsigned char *)c != FILL;
    for (char *c = was.at + was.size; c < was.pages + was.length; c++) guard_spoilt += *(unsigned char *)c != FILL;
    mmap(was.pages, was.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void *malloc(size_t n) { return guard_armed && guard_all ? guarded(16, n) : __libc_malloc(n); }

void *calloc(size_t n, size_t size) {
    if (!guard_armed || !guard_all) return __libc_calloc(n, size);
    size_t whole;
    if (__builtin_mul_overflow(n, size, &whole)) {
        errno = ENOMEM;
        return NULL;
    }
    void *p = guarded(16, whole);
    return p ? memset(p, 0, whole) : p;
}

void free(void *p) {
    if (!ours(p)) {
        __libc_free(p);
        return;
    }
    int saved = errno;
    release(p);
    errno = saved;
}

void *realloc(void *p, size_t n) {
    if (!p) return malloc(n);
    if (!ours(p)) return __libc_realloc(p, n);
    void *q = malloc(n);
    if (!q) return NULL;
    struct block *b = find(p);
    memcpy(q, p, b->size < n ? b->size : n);
    free(p);
    return q;
}

int posix_memalign(void **out, size_t align, size_t n) {
    void *p = guard_armed ? guarded(align, n) : __libc_memalign(align, n);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void *aligned_alloc(size_t align, size_t n) { return guard_armed ? guarded(align, n) : __libc_memalign(align, n); }
void *memalign(size_t align, size_t n) { return guard_armed ? guarded(align, n) : __libc_memalign(align, n); }

/* Make this block read-only. */
int guard_read_only(void *p) {
    struct block *b = ours(p) ? find(p) : NULL;
    return b && b->length ? mprotect(b->pages, b->length, PROT_READ) : -1;
}

int guard_writable(void *p) {
    struct block *b = ours(p) ? find(p) : NULL;
    return b && b->length ? mprotect(b->pages, b->length, PROT_READ | PROT_WRITE) : -1;
}

static void fault(int signal, siginfo_t *info, void *context) {
    guard_armed = 0;
    char *at = info->si_addr;
    greg_t error = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR];
    const char *what = error & 16 ? "executes" : error & 2 ? "writes" : "reads";
    struct block *near = NULL;
    size_t least = ~0ul;
    if (ours(at))
        for (unsigned k = 0; k < SLOTS; k++)
            if (blocks[k].at) {
                char *b = blocks[k].at;
                size_t away = at < b ? (size_t)(b - at) : at >= b + blocks[k].size ? (size_t)(at - b) - blocks[k].size + 1 : 0;
                /* Of two blocks at the same distance, prefer the live one. */
                if (away < least || (away == least && blocks[k].length)) least = away, near = &blocks[k];
            }
    if (report && near)
        snprintf(report, report_size, "%s byte %ld of a %sblock of %zu bytes", what, (long)(at - near->at),
                 near->length ? least ? "" : "locked " : "freed ", near->size);
    else if (report)
        snprintf(report, report_size, "%s at %s", what, at < (char *)PAGE ? "a null pointer" : "an address far from any block");
    _exit(FAULT);
    (void)signal;
}

/* Set the buffer for reports of faults in this process. */
void guard_begin(char *where, size_t size, size_t most) {
    static char stack[65536];
    report = where, report_size = size, limit = most;
    if (!arena) {
        arena = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) _exit(81);
        next_page = arena + PAGE;
    }
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, NULL);
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}
