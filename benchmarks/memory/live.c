// What malloc has handed out and not taken back, and the most of that: exact, and for all of a process, tensors
// and scratch memory of products alike. Loaded in front of glibc (LD_PRELOAD); read by benchmarks/memory/live.py.
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

enum { LEAST = 4096 };  // smaller blocks are not counted: they are many and come to little
static _Atomic long live, peak;

static void add(long bytes) {
  const long now = atomic_fetch_add(&live, bytes) + bytes;
  long most = atomic_load(&peak);
  while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
  }
}

static long size(void *block) {
  const size_t bytes = block == NULL ? 0 : malloc_usable_size(block);
  return bytes < LEAST ? 0 : (long)bytes;
}

static void *counted(void *block) {
  const long bytes = size(block);
  if (bytes) add(bytes);
  return block;
}

long live_bytes(void) { return atomic_load(&live); }

// The most since it was last asked.
long live_peak(void) {
  const long most = atomic_load(&peak);
  atomic_store(&peak, atomic_load(&live));
  return most;
}

void *malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }

void *calloc(size_t items, size_t bytes) { return counted(__libc_calloc(items, bytes)); }

void *realloc(void *block, size_t bytes) {
  const long before = size(block);
  void *moved = __libc_realloc(block, bytes);
  if (moved == NULL && bytes) return NULL;  // the block is as it was
  if (before) add(-before);
  return counted(moved);
}

void *memalign(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes)); }

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **block, size_t alignment, size_t bytes) {
  if (alignment % sizeof(void *) || alignment & (alignment - 1) || !alignment) return EINVAL;
  void *made = memalign(alignment, bytes);
  if (made == NULL) return ENOMEM;
  *block = made;
  return 0;
}

void free(void *block) {
  const long bytes = size(block);
  if (bytes) add(-bytes);
  __libc_free(block);
}
