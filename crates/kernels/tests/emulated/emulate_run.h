
// Runs the kernel; FUNCTION, its name, is a macro.

static const Params* emulated_params;

static void emulated_thread() {
    FUNCTION(*emulated_params);
    emulated::running[threadIdx.x] = false;
    swapcontext(&emulated::fibers[threadIdx.x], &emulated::scheduler);
}

extern "C" void run(unsigned grid, unsigned threads, const void* params) {
    using namespace emulated;
    if (threads > MOST || threads % 32) abort();
    emulated_params = (const Params*)params;
    gridDim.x = grid, blockDim.x = threads;
    char* stacks = (char*)malloc((size_t)MOST * STACK);
    for (unsigned group = 0; group < grid; group++) {
        for (unsigned t = 0; t < threads; t++) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks + (size_t)t * STACK;
            fibers[t].uc_stack.ss_size = STACK;
            fibers[t].uc_link = nullptr;
            makecontext(&fibers[t], emulated_thread, 0);
            running[t] = true, groups[t] = warps[t] = 0;
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned t = 0; t < threads; t++) {
                if (!running[t]) continue;
                threadIdx.x = t, blockIdx.x = group, any = true;
                swapcontext(&scheduler, &fibers[t]);
            }
        }
    }
    free(stacks);
}
