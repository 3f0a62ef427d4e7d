// From sums to outputs: twin of spec's gemm::OutputScale. Settings before this text: OUTPUT, the type of the outputs, ORDER, in
// which factors are applied, PER_TOKEN, whether they differ from row to row, and ADD, whether there is a β·C.

// What the sums of one operand's rows are multiplied by.
struct Side {
    const float* stored;  // null where the operand is plain
    float denominator;
    u32 divisor;  // whether a stored number is a divisor
    u32 per_row;
    u32 padding;
};

struct Output {
    Side a, b;
    const float* bias;  // null where there is none
    const u8* c;
    u8* out;
    u64 rows, cols;  // M and N
    float alpha, beta;
    u32 pairs;  // whether every even output starts at a multiple of two outputs' bytes
    u32 padding;
};

static_assert(sizeof(Output) == 104, "as in output.rs");

RULE float numerator(const Side& side, u64 i) {
    if (!side.stored) return 1.0f;
    float g = side.stored[side.per_row ? i : 0];
    return side.divisor ? 1.0f / g : g;
}

// A sum is multiplied by the first, then by the second, then by the third; a factor of 1 changes nothing.
struct Factors {
    float x, y, z;
};

RULE Factors factors(const Output& o, float na, float nb) {
    float denominator = o.a.denominator * o.b.denominator;
    if (ORDER == FOLDED) return {na * nb / denominator, 1.0f, 1.0f};
    if (ORDER == ONE_ROW) return {1.0f / denominator, na * nb, 1.0f};
    return {1.0f / denominator, na, nb};
}

// What a missing bias is: the one number that changes no sum.
RULE float bias_of(const Output& o, u64 j) { return o.bias ? o.bias[j] : -0.0f; }

RULE float load_output(const u8* from, u64 at) {
    if (OUTPUT == F32) return ((const float*)from)[at];
    u16 bits = ((const u16*)from)[at];
    return OUTPUT == BF16 ? precision::from_bf16(bits) : precision::from_f16(bits);
}

// The output at index `at`, before it is rounded to its type.
RULE float finish(const Output& o, const Factors& f, float sum, float bias, u64 at) {
    float y = f.x * sum;
    if (ORDER != FOLDED) y = y * f.y;
    if (ORDER == BOTH_ROWS) y = y * f.z;
    y = y * o.alpha + bias;
    if (!ADD) return y;
    float c = o.beta * load_output(o.c, at);
    if (ORDER == FOLDED) return y + c;
    return precision::round(y, OUTPUT) + precision::round(c, OUTPUT);
}

RULE u32 pack_output(float low, float high) { return OUTPUT == F16 ? pack_f16(low, high) : pack_bf16(low, high); }

RULE void store_output(const Output& o, u64 at, float y) {
    if (OUTPUT == F32) ((float*)o.out)[at] = y;
    else ((u16*)o.out)[at] = (u16)pack_output(y, 0.0f);
}

constexpr u32 SIZE = OUTPUT == F32 ? 4 : 2;

RULE void store_pair(u8* at, float first, float second) {
    if (OUTPUT == F32) *(float2*)at = make_float2(first, second);
    else *(u32*)at = pack_output(first, second);
}

// Writes outputs in columns j and j + 1, as far as they exist.
struct PairWriter {
    const Output& o;
    u64 j;
    float nb[2], bias[2];
    Factors f[2];
    bool whole;  // both exist and are written together

    RULE PairWriter(const Output& o, u64 j) : o(o), j(j) {
        whole = j + 1 < o.cols && o.pairs;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool there = j + h < o.cols;
            nb[h] = there ? numerator(o.b, j + h) : 0.0f;
            bias[h] = there ? bias_of(o, j + h) : 0.0f;
        }
        if (!PER_TOKEN) of_row(0);
    }

    RULE void of_row(u64 i) {
        float na = numerator(o.a, i);
        f[0] = factors(o, na, nb[0]), f[1] = factors(o, na, nb[1]);
    }

    // Whether rows before `last` can be written without a look at each.
    RULE bool straight(u64 last) const { return !PER_TOKEN && !ADD && whole && last <= o.rows; }
    RULE u64 pitch() const { return o.cols * SIZE; }
    RULE u8* address(u64 i) const { return o.out + i * pitch() + j * SIZE; }
    RULE void write_straight(u8* at, float first, float second) const {
        store_pair(at, finish(o, f[0], first, bias[0], 0), finish(o, f[1], second, bias[1], 0));
    }

    RULE void write(u64 i, float first, float second) {
        if (i >= o.rows || j >= o.cols) return;
        u64 at = i * o.cols + j;
        if (PER_TOKEN) of_row(i);
        float y = finish(o, f[0], first, bias[0], at);
        if (whole) store_pair(o.out + SIZE * at, y, finish(o, f[1], second, bias[1], at + 1));
        else {
            store_output(o, at, y);
            if (j + 1 < o.cols) store_output(o, at + 1, finish(o, f[1], second, bias[1], at + 1));
        }
    }
};
