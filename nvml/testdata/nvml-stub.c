// Fake libnvidia-ml.so.1 for CI without a GPU.
//
//   gcc -shared -fPIC -O1 -Wall -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml-stub.c
//
// State is re-read from the text file named by $NVML_STUB_STATE on every call, so a test
// can change memory, processes and health while the program runs. Without the variable one
// default 24 GiB GPU is reported. Lines (space separated, '#' comments):
//
//   init <ret>                                    what nvmlInit_v2 returns (0 = SUCCESS, 18 = LIB_RM_VERSION_MISMATCH)
//   gpu <uuid> <totalMiB> <reservedMiB> <usedMiB> <util%> <tempC> <powerMilliW> <ret>
//                                                 <ret> is what every device query answers (0 ok, 3 NOT_SUPPORTED, 15 GPU_IS_LOST, 999)
//   mig <gpuIdx>                                  MIG is enabled
//   name <gpuIdx> <name>                          default "Stub GPU <gpuIdx>"
//   nomem <gpuIdx>                                memory queries answer NOT_SUPPORTED (GB10 / Jetson)
//   proc <gpuIdx> <pid> <usedMiB|-1>              -1 = NVML_VALUE_NOT_AVAILABLE (WSL2 / WDDM)
//   xid <gpuIdx> <code>                           delivered once, in file order, by nvmlEventSetWait_v2
//   driver <version>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <time.h>

typedef int nvmlReturn_t;                        // C enum, 4 bytes
typedef struct nvmlDevice_st *nvmlDevice_t;      // opaque pointer, passed by value
typedef struct nvmlEventSet_st *nvmlEventSet_t;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;                                  // 24
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t; // 40 (4 pad)
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;            // 16
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t; // 24 (v2 and v3)
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;                                         // 8
typedef struct { char busIdLegacy[16]; unsigned int domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } nvmlPciInfo_t; // 68
typedef struct { nvmlDevice_t device; unsigned long long eventType, eventData; unsigned int gpuInstanceId, computeInstanceId; } nvmlEventData_t; // 32

_Static_assert(sizeof(nvmlMemory_t) == 24, "mem v1");
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "mem v2");
_Static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "proc v1");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "proc v2/v3");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "pci");
_Static_assert(sizeof(nvmlEventData_t) == 32, "event");
#define NVML_MEMORY_V2 (unsigned)(sizeof(nvmlMemory_v2_t) | (2u << 24)) // 0x02000028

enum { OK = 0, UNINIT = 1, INVAL = 2, NOTSUP = 3, NOTFOUND = 6, INSUFF = 7, TIMEOUT = 10, ARGVER = 25 };
#define MAXG 16
#define MAXP 64
#define MIB (1024ULL * 1024ULL)
#define XIDBIT 8ULL // nvmlEventTypeXidCriticalError 0x8

struct gpu { char uuid[96]; unsigned long long total, resv, used; unsigned util, temp, power; int ret, nomem, mig; char name[96]; };
struct state {
  int init, ngpu, nproc, nxid; char driver[80]; struct gpu g[MAXG];
  struct { int gpu; unsigned pid; long long mib; } p[MAXP];
  struct { int gpu; unsigned code; } x[MAXP];
};
static int inited, xid_seen;
static char handles[MAXG];                        // &handles[i] is the device handle

static void load(struct state *s) {
  memset(s, 0, sizeof *s);
  strcpy(s->driver, "999.00-stub");
  const char *path = getenv("NVML_STUB_STATE");
  FILE *f = path ? fopen(path, "r") : NULL;
  if (!f) {
    s->ngpu = 1;
    s->g[0] = (struct gpu){"GPU-00000000-0000-0000-0000-000000000000", 24576, 300, 0, 0, 35, 20000, 0, 0, 0, ""};
    return;
  }
  char line[512];
  while (fgets(line, sizeof line, f)) {
    struct gpu g = {0}; int a; unsigned b; long long c;
    if (sscanf(line, "init %d", &a) == 1) s->init = a;
    else if (sscanf(line, "driver %79s", s->driver) == 1) ;
    else if (s->ngpu < MAXG && sscanf(line, "gpu %95s %llu %llu %llu %u %u %u %d", g.uuid, &g.total, &g.resv, &g.used, &g.util, &g.temp, &g.power, &g.ret) == 8) s->g[s->ngpu++] = g;
    else if (sscanf(line, "mig %d", &a) == 1 && a >= 0 && a < MAXG) s->g[a].mig = 1;
    else if (sscanf(line, "name %d", &a) == 1 && a >= 0 && a < MAXG) sscanf(line, "name %*d %95[^\n]", s->g[a].name);
    else if (sscanf(line, "nomem %d", &a) == 1 && a >= 0 && a < MAXG) s->g[a].nomem = 1;
    else if (s->nproc < MAXP && sscanf(line, "proc %d %u %lld", &a, &b, &c) == 3) { s->p[s->nproc].gpu = a; s->p[s->nproc].pid = b; s->p[s->nproc++].mib = c; }
    else if (s->nxid < MAXP && sscanf(line, "xid %d %u", &a, &b) == 2) { s->x[s->nxid].gpu = a; s->x[s->nxid++].code = b; }
  }
  fclose(f);
}
static int idx(nvmlDevice_t d) { long i = (char *)d - handles; return i >= 0 && i < MAXG ? (int)i : -1; }
#define DEV(d)                                                \
  struct state s; load(&s);                                   \
  if (!inited) return UNINIT;                                 \
  int i = idx(d); if (i < 0 || i >= s.ngpu) return INVAL;     \
  if (s.g[i].ret) return s.g[i].ret;                          \
  struct gpu *g = &s.g[i]; (void)g

nvmlReturn_t nvmlInit_v2(void) { struct state s; load(&s); if (s.init) return s.init; inited++; return OK; }
nvmlReturn_t nvmlInitWithFlags(unsigned f) { (void)f; return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { if (!inited) return UNINIT; inited--; return OK; }
const char *nvmlErrorString(nvmlReturn_t r) {
  switch (r) {
  case 0: return "Success"; case 1: return "Uninitialized"; case 2: return "Invalid Argument";
  case 3: return "Not Supported"; case 4: return "Insufficient Permissions"; case 6: return "Not Found";
  case 7: return "Insufficient Size"; case 9: return "Driver Not Loaded"; case 10: return "Timeout";
  case 15: return "GPU is lost"; case 18: return "Driver/library version mismatch"; case 999: return "Unknown Error";
  } return "stub: other error";
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *v, unsigned n) { struct state s; load(&s); if (!inited) return UNINIT; snprintf(v, n, "%s", s.driver); return OK; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) { struct state s; load(&s); if (!inited) return UNINIT; *n = s.ngpu; return OK; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) {
  struct state s; load(&s); if (!inited) return UNINIT; if ((int)i >= s.ngpu) return INVAL;
  if (s.g[i].ret == 15) return 15;                // a lost GPU already fails here on real drivers
  *d = (nvmlDevice_t)&handles[i]; return OK;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *u, nvmlDevice_t *d) {
  struct state s; load(&s); if (!inited) return UNINIT;
  for (int i = 0; i < s.ngpu; i++) if (!strcmp(u, s.g[i].uuid)) { *d = (nvmlDevice_t)&handles[i]; return OK; }
  return NOTFOUND;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *n) { DEV(d); *n = i; return OK; }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *b, unsigned n) { DEV(d); if (strlen(g->uuid) + 1 > n) return INSUFF; strcpy(b, g->uuid); return OK; }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *b, unsigned n) { DEV(d); if (g->name[0]) snprintf(b, n, "%s", g->name); else snprintf(b, n, "Stub GPU %d", i); return OK; }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) {
  DEV(d); memset(p, 0, sizeof *p); p->bus = i + 1; p->pciDeviceId = 0x268410DE;
  snprintf(p->busIdLegacy, 16, "0000:%02X:00.0", (unsigned char)(i + 1)); snprintf(p->busId, 32, "00000000:%02X:00.0", i + 1); return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {         // v1: used INCLUDES reserved
  DEV(d); if (g->nomem) return NOTSUP;
  m->total = g->total * MIB; m->used = (g->used + g->resv) * MIB; m->free = m->total - m->used; return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) {   // v2: used EXCLUDES reserved
  DEV(d); if (m->version != NVML_MEMORY_V2) return ARGVER; if (g->nomem) return NOTSUP;
  m->total = g->total * MIB; m->reserved = g->resv * MIB; m->used = g->used * MIB; m->free = m->total - m->used - m->reserved; return OK;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) { DEV(d); u->gpu = g->util; u->memory = g->util / 2; return OK; }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned *t) { (void)sensor; DEV(d); *t = g->temp; return OK; }
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *mw) { DEV(d); *mw = g->power; return OK; }
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *cur, unsigned *pend) { DEV(d); if (!g->mig) return NOTSUP; *cur = *pend = 1; return OK; }
static nvmlReturn_t procs(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *o) {
  DEV(d); unsigned have = 0;
  for (int k = 0; k < s.nproc; k++) if (s.p[k].gpu == i) have++;
  if (*n < have || (have && !o)) { *n = have; return INSUFF; }
  unsigned j = 0;
  for (int k = 0; k < s.nproc; k++) if (s.p[k].gpu == i)
    o[j++] = (nvmlProcessInfo_t){s.p[k].pid, s.p[k].mib < 0 ? ~0ULL : (unsigned long long)s.p[k].mib * MIB, ~0u, ~0u};
  *n = j; return OK;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *o) { return procs(d, n, o); }
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *o) { (void)o; DEV(d); *n = 0; return OK; }
// events
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *m) { DEV(d); *m = XIDBIT | 1 | 2; return OK; }
static char evset;
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *e) { if (!inited) return UNINIT; *e = (nvmlEventSet_t)&evset; return OK; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t e) { (void)e; return OK; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long m, nvmlEventSet_t e) { (void)m; (void)e; DEV(d); return OK; }
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t e, nvmlEventData_t *o, unsigned ms) {
  (void)e;
  for (unsigned t = 0;; t += 10) {
    struct state s; load(&s);
    if (xid_seen < s.nxid) {
      *o = (nvmlEventData_t){(nvmlDevice_t)&handles[s.x[xid_seen].gpu], XIDBIT, s.x[xid_seen].code, ~0u, ~0u};
      xid_seen++; return OK;
    }
    if (t >= ms) return TIMEOUT;
    nanosleep(&(struct timespec){0, 10000000}, NULL);
  }
}
