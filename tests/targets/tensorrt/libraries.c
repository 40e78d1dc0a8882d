/* Stand-ins for the libraries that TensorRT's Python bindings link to and for the driver of a GPU: with them the
   bindings of every version can be imported, and memory "on the GPU" be used, on a machine without either. */
#include <stdlib.h>
#include <string.h>

#define NOTHING(name) void *name(void) { return 0; }
#define NOTHING_AS(name, symbol) void *name(void) __asm__(symbol); NOTHING(name)
NOTHING(createInferBuilder_INTERNAL) NOTHING(createInferRefitter_INTERNAL) NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL) NOTHING(createNvOnnxParser_INTERNAL) NOTHING(getBuilderPluginRegistry)
NOTHING(getNvOnnxParserVersion) NOTHING(getPluginRegistry) NOTHING(initLibNvInferPlugins)
NOTHING_AS(caffe, "_ZN14nvcaffeparser117createCaffeParserEv")
NOTHING_AS(caffe_end, "_ZN14nvcaffeparser123shutdownProtobufLibraryEv")
NOTHING_AS(uff, "_ZN11nvuffparser15createUffParserEv")
NOTHING_AS(uff_field, "_ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi")

typedef unsigned long size;
static size used, total = 1UL << 34;

int cuInit(int flags) { return getenv("NO_GPU") ? 100 : 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "no device"; return 0; }
int cuDeviceGet(int *device, int index) { *device = 0; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA Test", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuDeviceTotalMem_v2(size *bytes, int device) { *bytes = total; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &used; return 0; }
int cuCtxSetCurrent(void *context) { return context != &used; }
int cuMemGetInfo_v2(size *free, size *all) { *free = total - used; *all = total; return 0; }
int cuStreamCreate(void **stream, int flags) { *stream = malloc(1); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuEventCreate(void **event, int flags) { *event = malloc(1); return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int getInferLibVersion(void) { char *version = getenv("TENSORRT_LIBRARY"); return version ? atoi(version) : 0; }
int cuEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 1.5f; return 0; }
int cuMemAlloc_v2(void **address, size bytes)
{
    if (bytes > total - used)
        return 2;
    size *block = malloc(bytes + sizeof(size));
    *block = bytes;
    used += bytes;
    *address = block + 1;
    return 0;
}
int cuMemFree_v2(void *address) { size *block = (size *)address - 1; used -= *block; free(block); return 0; }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size bytes, void *stream) { memcpy(to, from, bytes); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size bytes, void *stream) { memcpy(to, from, bytes); return 0; }
