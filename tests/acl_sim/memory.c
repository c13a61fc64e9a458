/* Host and device allocations, which the runtime distinguishes. Both are this process's memory. */
#include "acl_sim.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct range {
    char *address;
    size_t bytes;
    int type;
    int device;
    int owned; /* allocated here, not registered */
    struct range *next;
} range_t;

static const size_t device_bytes = (size_t)8 << 30;
static const size_t host_call_limit = (size_t)200 * 1000 * 1000 * 1000;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range_t *ranges;
static size_t host_limit = SIZE_MAX;
static int first_device; /* the runtime's number of device 0 */

int memory_add(void *address, size_t bytes, int type, int device, int owned) {
    range_t *range = malloc(sizeof *range);
    if (range == NULL) return RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lock);
    *range = (range_t){address, bytes, type, device, owned, ranges};
    ranges = range;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int memory_remove(void *address, int type, int owned) {
    pthread_mutex_lock(&lock);
    for (range_t **link = &ranges; *link != NULL; link = &(*link)->next) {
        range_t *range = *link;
        if (range->address != address || range->type != type || range->owned != owned) continue;
        *link = range->next;
        pthread_mutex_unlock(&lock);
        if (owned) free(address);
        free(range);
        return SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return fail(RT_PARAM_INVALID, "%p was not allocated, or not that way", address);
}

static range_t *find(const char *address) {
    for (range_t *range = ranges; range != NULL; range = range->next)
        if (address >= range->address && address < range->address + range->bytes) return range;
    return NULL;
}

location_t memory_find(const void *address) {
    pthread_mutex_lock(&lock);
    range_t *range = find(address);
    location_t location = {0, LOCATION_UNREGISTERED};
    if (range != NULL) location = (location_t){(uint32_t)range->device, range->type};
    if (location.type == LOCATION_DEVICE) location.id += (uint32_t)first_device;
    pthread_mutex_unlock(&lock);
    return location;
}

int memory_holds(const void *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    range_t *range = find(address);
    int holds = range == NULL || (const char *)address + bytes <= range->address + range->bytes;
    pthread_mutex_unlock(&lock);
    return holds;
}

size_t memory_bytes(int type) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (range_t *range = ranges; range != NULL; range = range->next)
        if (range->type == type) bytes += range->bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

int memory_count(int type) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (range_t *range = ranges; range != NULL; range = range->next) count += range->type == type;
    pthread_mutex_unlock(&lock);
    return count;
}

static int allocate(void **address, size_t bytes, size_t alignment, int type, int device) {
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, bytes) != 0)
        return fail(RT_MEMORY_ALLOCATION, "no memory for %zu bytes", bytes);
    int code = memory_add(memory, bytes, type, device, 1);
    if (code == SUCCESS) *address = memory;
    return code;
}

EXPORT int aclrtMalloc(void **address, size_t bytes, int policy) {
    (void)policy;
    REQUIRE_CONTEXT();
    if (address == NULL || bytes == 0) return fail(INVALID_PARAM, "aclrtMalloc: %zu bytes", bytes);
    if (memory_bytes(LOCATION_DEVICE) + bytes > device_bytes)
        return fail(RT_MEMORY_ALLOCATION, "aclrtMalloc: the device is full");
    return allocate(address, bytes, 512, LOCATION_DEVICE, current_device());
}

EXPORT int aclrtMallocAlign32(void **address, size_t bytes, int policy) {
    return aclrtMalloc(address, bytes, policy);
}

EXPORT int aclrtFree(void *address) {
    REQUIRE_CONTEXT();
    return memory_remove(address, LOCATION_DEVICE, 1);
}

EXPORT int aclrtMallocHost(void **address, size_t bytes) {
    REQUIRE_CONTEXT();
    if (address == NULL || bytes == 0)
        return fail(INVALID_PARAM, "aclrtMallocHost: %zu bytes", bytes);
    if (breaks_capture())
        return fail(RT_CAPTURE_MODE, "aclrtMallocHost: a graph is being captured");
    if (bytes > host_call_limit || memory_bytes(LOCATION_HOST) + bytes > host_limit)
        return fail(RT_MEMORY_ALLOCATION, "aclrtMallocHost: cannot have %zu bytes", bytes);
    return allocate(address, bytes, 4096, LOCATION_HOST, 0);
}

EXPORT int aclrtFreeHost(void *address) {
    REQUIRE_CONTEXT();
    return memory_remove(address, LOCATION_HOST, 1);
}

EXPORT int aclrtHostRegisterV2(void *address, uint64_t bytes, uint32_t flags) {
    REQUIRE_CONTEXT();
    if (address == NULL || bytes == 0 || flags == 0)
        return fail(INVALID_PARAM, "aclrtHostRegisterV2: address %p, flags %#x", address, flags);
    if ((uintptr_t)address % 4096 != 0)
        return fail(RT_PARAM_INVALID, "aclrtHostRegisterV2: %p is not 4 KiB aligned", address);
    if (memory_find(address).type != LOCATION_UNREGISTERED)
        return fail(RT_PARAM_INVALID, "aclrtHostRegisterV2: %p is pinned already", address);
    return memory_add(address, bytes, LOCATION_HOST, 0, 0);
}

EXPORT int aclrtHostRegister(void *address, uint64_t bytes, int type, void **device_address) {
    if (type != 0 || device_address == NULL)
        return fail(INVALID_PARAM, "aclrtHostRegister: type %d", type);
    *device_address = address;
    return aclrtHostRegisterV2(address, bytes, REGISTER_MAPPED);
}

EXPORT int aclrtHostUnregister(void *address) {
    REQUIRE_CONTEXT();
    return memory_remove(address, LOCATION_HOST, 0);
}

#ifndef ACL_SIM_WITHOUT_BATCH
EXPORT int aclrtPointerGetAttributes(const void *address, pointer_attributes_t *attributes) {
    REQUIRE_CONTEXT();
    if (address == NULL || attributes == NULL)
        return fail(INVALID_PARAM, "aclrtPointerGetAttributes: NULL");
    memset(attributes, 0, sizeof *attributes);
    attributes->location = memory_find(address);
    return SUCCESS;
}
#endif

EXPORT int aclrtGetMemInfo(int what, size_t *free_bytes, size_t *total) {
    (void)what;
    REQUIRE_CONTEXT();
    *total = device_bytes;
    *free_bytes = device_bytes - memory_bytes(LOCATION_DEVICE);
    return SUCCESS;
}

/* For tests */

/* As if only some of the machine's devices were visible to the process. */
EXPORT void acl_sim_set_first_device(int number) { first_device = number; }
EXPORT void acl_sim_limit_host(size_t bytes) { host_limit = bytes; }
EXPORT int acl_sim_num_host(void) { return memory_count(LOCATION_HOST); }
EXPORT int acl_sim_num_device(void) { return memory_count(LOCATION_DEVICE); }
