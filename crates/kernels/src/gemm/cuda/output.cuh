// From sums to outputs: twin of spec's gemm::OutputScale. Settings before this text: OUTPUT, the
// type of the outputs; ORDER of the factors; PER_TOKEN, whether they differ between tokens; ADD,
// whether there is a β·C; SWAPPED, whether tokens are the columns of the outputs instead of the
// rows.

// What the sums of one operand's rows are multiplied by.
struct Side {
    const float* stored;  // null where the operand is plain
    float denominator;
    u32 divisor;  // whether a stored number is a divisor
    u32 per_row;
    u32 step;  // numbers from one group to the next, where one is for a whole group
};

struct Output {
    Side a, b;
    const u8* bias;  // null where there is none
    const u8* c;
    u8* out;
    u64 rows, cols;  // M and N
    float alpha, beta;
    u32 pairs;  // whether every even output starts at a multiple of two outputs' bytes
    u32 bias_type;
};

static_assert(sizeof(Output) == 104, "as in output.rs");

RULE float numerator(const Side& side, u64 i) {
    if (!side.stored) return 1.0f;
    float g = side.stored[side.per_row ? i : 0];
    return side.divisor ? 1.0f / g : g;
}

// A sum is multiplied by the first, then by the second, then by the third; a factor of 1 changes
// nothing.
struct Factors {
    float x, y, z;
};

RULE Factors factors(const Output& o, float na, float nb) {
    float denominator = o.a.denominator * o.b.denominator;
    if (ORDER == FOLDED) return {na * nb / denominator, 1.0f, 1.0f};
    if (ORDER == ONE_ROW) return {1.0f / denominator, na * nb, 1.0f};
    return {1.0f / denominator, na, nb};
}

RULE float load_number(const u8* from, u64 at, Precision type) {
    if (type == F32) return ((const float*)from)[at];
    u16 bits = ((const u16*)from)[at];
    return type == BF16 ? precision::from_bf16(bits) : precision::from_f16(bits);
}

// What a missing bias is: the one number that changes no sum.
RULE float bias_of(const Output& o, u64 j) { return o.bias ? load_number(o.bias, j, (Precision)o.bias_type) : -0.0f; }

// The output at index `at`, before it is rounded to its type.
RULE float finish(const Output& o, const Factors& f, float sum, float bias, u64 at) {
    float y = f.x * sum;
    if (ORDER != FOLDED) y = y * f.y;
    if (ORDER == BOTH_ROWS) y = y * f.z;
    y = y * o.alpha + bias;
    if (!ADD) return y;
    float c = o.beta * load_number(o.c, at, OUTPUT);
    if (ORDER == FOLDED) return y + c;
    return precision::round(y, OUTPUT) + precision::round(c, OUTPUT);
}

RULE u32 pack_output(float low, float high) { return OUTPUT == F16 ? pack_f16(low, high) : pack_bf16(low, high); }

RULE void store_output(const Output& o, u64 at, float y) {
    if (OUTPUT == F32) ((float*)o.out)[at] = y;
    else ((u16*)o.out)[at] = (u16)pack_output(y, 0.0f);
}

constexpr u32 SIZE = OUTPUT == F32 ? 4 : 2;

// The outputs of a group of rows of A, and of as many groups of rows of B.
RULE Output rows_of_group(Output o, u32 group, u64 first, u64 rows) {
    u64 before = first * o.cols * SIZE;
    o.rows = rows, o.out += before, o.c += ADD ? before : 0;
    if (o.a.stored) o.a.stored += o.a.per_row ? first : group * o.a.step;
    if (o.b.stored) o.b.stored += o.b.per_row ? group * o.cols : group * o.b.step;
    if (o.bias) o.bias += group * o.cols * (o.bias_type == F32 ? 4 : 2);
    return o;
}

// The outputs of a group along K: a matrix of its own.
RULE Output matrix_of_group(const Output& o, u32 group) { return rows_of_group(o, group, group * o.rows, o.rows); }

RULE void store_pair(u8* at, float first, float second) {
    if (OUTPUT == F32) *(float2*)at = make_float2(first, second);
    else *(u32*)at = pack_output(first, second);
}

// How many tokens there are.
RULE u64 token_count(const Output& o) { return SWAPPED ? o.cols : o.rows; }

// Writes the outputs of weights j and j + 1, as far as they exist.
struct PairWriter {
    const Output& o;
    u64 j;
    float own[2], bias[2];
    Factors f[2];
    bool whole;  // both exist, and neighbouring outputs are written together

    METHOD PairWriter(const Output& o, u64 j) : o(o), j(j) {
        u64 weights = SWAPPED ? o.rows : o.cols;
        whole = j + 1 < weights && o.pairs;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool there = j + h < weights;
            own[h] = there ? numerator(SWAPPED ? o.a : o.b, j + h) : 0.0f;
            bias[h] = SWAPPED ? -0.0f : there ? bias_of(o, j + h) : 0.0f;
        }
        if (!PER_TOKEN) of_token(0);
    }

    METHOD void of_token(u64 t) {
        float other = numerator(SWAPPED ? o.b : o.a, t);
#pragma unroll
        for (int h = 0; h < 2; h++) f[h] = SWAPPED ? factors(o, own[h], other) : factors(o, other, own[h]);
    }

    // Whether tokens before `last` can be written without checks.
    METHOD bool straight(u64 last) const {
        return !PER_TOKEN && !ADD && whole && last <= token_count(o) && !(SWAPPED && o.bias);
    }
    METHOD u64 pitch() const { return o.cols * SIZE; }
    METHOD u8* address(u64 t) const { return o.out + (SWAPPED ? j * pitch() + t * SIZE : t * pitch() + j * SIZE); }
    METHOD void write_straight(u8* at, float first, float second) const {
        store_pair(at, finish(o, f[0], first, bias[0], 0), finish(o, f[1], second, bias[1], 0));
    }
    // The outputs of one weight with two neighbouring tokens, where tokens are columns.
    METHOD void write_swapped(u8* at, int h, float first, float second) const {
        store_pair(at, finish(o, f[h], first, -0.0f, 0), finish(o, f[h], second, -0.0f, 0));
    }

    // The outputs of both weights with a token.
    METHOD void write(u64 t, float first, float second) {
        if (t >= token_count(o)) return;
        if (PER_TOKEN) of_token(t);
        if (SWAPPED) {
            float b = bias_of(o, t);
            if (j < o.rows) one(j * o.cols + t, f[0], first, b);
            if (j + 1 < o.rows) one((j + 1) * o.cols + t, f[1], second, b);
            return;
        }
        if (j >= o.cols) return;
        u64 at = t * o.cols + j;
        if (whole) {
            float y = finish(o, f[0], first, bias[0], at);
            store_pair(o.out + SIZE * at, y, finish(o, f[1], second, bias[1], at + 1));
        } else {
            one(at, f[0], first, bias[0]);
            if (j + 1 < o.cols) one(at + 1, f[1], second, bias[1]);
        }
    }

    METHOD void one(u64 at, const Factors& f, float sum, float bias) const {
        store_output(o, at, finish(o, f, sum, bias, at));
    }
};
