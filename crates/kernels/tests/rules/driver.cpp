// The rules for the host, one call per record. The constants, rules.cuh and fp8_rules.cuh come
// before this text.
//
// `driver NAME` reads records of 32-bit words from its input to the end, calls the function NAME
// with each, and writes the words of the results. A binary32 number is the word of its bits, a
// 64-bit number two words, low one first.

#include <cstdio>
#include <cstring>
#include <vector>

// All NaNs are one.
static u32 word(float x) { return x != x ? 0x7FC00000 : to_bits(x); }

static u64 wide(const u32* in) { return in[0] | (u64)in[1] << 32; }

static void floats(const u32* in, float* out, int n) {
    for (int i = 0; i < n; i++) out[i] = from_bits(in[i]);
}

// amax, 6E, specials
static scale::Global global(const u32* in) { return scale::global(from_bits(in[0]), from_bits(in[1]), (Specials)in[2]); }

// A tile of H rows by the rules alone: amax, 6E, specials, precision, profile, rule, error path,
// whether rounding is stochastic, then H·16 elements, then H·4 words of random bytes. The results
// are the scale and H·16 codes.
template <int H>
static void quantize(const u32* in, u32* out) {
    constexpr int N = H * BLOCK;
    scale::Global g = global(in);
    Specials specials = (Specials)in[2];
    Precision precision = (Precision)in[3];
    Profile profile = (Profile)in[4];
    ScaleRule rule = (ScaleRule)in[5];
    ErrorPath path = (ErrorPath)in[6];
    const u32* random = in + 8 + N;
    float x[N];
    floats(in + 8, x, N);

    u32 bits = 0;
    for (int i = 0; i < N; i++) {
        u32 b = scale::magnitude_bits(x[i], profile::amax_specials(profile, specials));
        bits = bits > b ? bits : b;
    }
    float block_amax = from_bits(bits);

    u32 byte;
    if (rule == SIX || rule >= LEAST_SQUARES) {
        byte = profile::block_scale(block_amax, g, profile, precision, specials);
        if (rule == LEAST_SQUARES) byte = mse::search(x, byte, g, profile, precision, specials);
        else if (rule != SIX) byte = modelopt::search(x, block_amax, byte, g, rule);
    } else {
        Metric metric = rule == FOUR_OVER_SIX_MSE ? MSE : MAE;
        four_over_six::Pair pair = four_over_six::candidate_scales(block_amax, g, specials);
        float six[BLOCK], four[BLOCK];
        for (int r = 0; r < H; r++) {
            six[r] = four_over_six::row_error(x + r * BLOCK, pair.six, g, metric, path, specials);
            four[r] = four_over_six::row_error(x + r * BLOCK, pair.four, g, metric, path, specials);
        }
        bool better = H == 1 ? four[0] < six[0] : four_over_six::sum_rows(four, 1) < four_over_six::sum_rows(six, 1);
        byte = better ? pair.four : pair.six;
    }

    profile::Factor factor = profile::factor(byte, g, profile, precision, specials);
    Specials code_specials = profile::code_specials(profile, specials);
    out[0] = byte;
    for (int i = 0; i < N; i++) {
        float y = profile::apply(factor, x[i]);
        if (in[7] && !(profile == MODEL_OPT && is_nan(y))) out[1 + i] = stochastic::encode(y, random[i / 4] >> (8 * (i % 4)) & 255, code_specials);
        else out[1 + i] = profile::code(y, profile, specials);
    }
}

using In = const u32*;
using Out = u32*;

struct Function {
    const char* name;
    int inputs, outputs;
    void (*call)(In in, Out out);
};

static const Function FUNCTIONS[] = {
    {"min_with_max", 2, 1, [](In in, Out out) { out[0] = word(min_with_max(from_bits(in[0]), (Specials)in[1])); }},
    {"precision::from_bf16", 1, 1, [](In in, Out out) { out[0] = word(precision::from_bf16((u16)in[0])); }},
    {"precision::from_f16", 1, 1, [](In in, Out out) { out[0] = word(precision::from_f16((u16)in[0])); }},
    {"precision::to_bf16", 1, 1, [](In in, Out out) { out[0] = precision::to_bf16(from_bits(in[0])); }},
    {"precision::to_f16", 1, 1, [](In in, Out out) { out[0] = precision::to_f16(from_bits(in[0])); }},
    {"precision::round", 2, 1, [](In in, Out out) { out[0] = word(precision::round(from_bits(in[0]), (Precision)in[1])); }},
    {"precision::min_normal", 1, 1, [](In in, Out out) { out[0] = word(precision::min_normal((Precision)in[0])); }},
    {"precision::max", 1, 1, [](In in, Out out) { out[0] = word(precision::max((Precision)in[0])); }},
    {"e2m1::encode", 2, 1, [](In in, Out out) { out[0] = e2m1::encode(from_bits(in[0]), (Specials)in[1]); }},
    {"e2m1::decode", 1, 1, [](In in, Out out) { out[0] = word(e2m1::decode(in[0])); }},
    {"e4m3::encode", 1, 1, [](In in, Out out) { out[0] = e4m3::encode(from_bits(in[0])); }},
    {"e4m3::decode", 1, 1, [](In in, Out out) { out[0] = word(e4m3::decode(in[0])); }},
    {"scale::magnitude_bits", 2, 1, [](In in, Out out) { out[0] = scale::magnitude_bits(from_bits(in[0]), (Specials)in[1]); }},
    {"scale::global", 3, 4, [](In in, Out out) {
        scale::Global g = global(in);
        out[0] = word(g.amax), out[1] = word(g.six_e), out[2] = word(g.encode), out[3] = word(g.decode);
    }},
    {"scale::block_scale", 4, 1, [](In in, Out out) {
        out[0] = scale::block_scale(from_bits(in[3]), global(in), (Specials)in[2]);
    }},
    {"scale::inverse_scale", 4, 1, [](In in, Out out) { out[0] = word(scale::inverse_scale(in[3], global(in), (Specials)in[2])); }},
    {"scale::decode_factor", 4, 1, [](In in, Out out) {
        out[0] = word(scale::decode_factor(in[0], from_bits(in[1]), (scale::Unit)in[2], from_bits(in[3])));
    }},
    // amax, 6E, profile, precision
    {"profile::stored", 4, 1, [](In in, Out out) {
        out[0] = word(profile::stored(from_bits(in[0]), from_bits(in[1]), (Profile)in[2], (Precision)in[3]));
    }},
    // amax, 6E, specials, profile, precision, block amax
    {"profile::block_scale", 6, 1, [](In in, Out out) {
        out[0] = profile::block_scale(from_bits(in[5]), global(in), (Profile)in[3], (Precision)in[4], (Specials)in[2]);
    }},
    // amax, 6E, specials, profile, precision, byte, element
    {"profile::factor", 7, 3, [](In in, Out out) {
        profile::Factor f = profile::factor(in[5], global(in), (Profile)in[3], (Precision)in[4], (Specials)in[2]);
        out[0] = f.divide, out[1] = word(f.by), out[2] = word(profile::apply(f, from_bits(in[6])));
    }},
    {"profile specials", 2, 2, [](In in, Out out) {
        out[0] = profile::code_specials((Profile)in[0], (Specials)in[1]);
        out[1] = profile::amax_specials((Profile)in[0], (Specials)in[1]);
    }},
    {"philox::philox4x32", 6, 4, [](In in, Out out) {
        philox::Words words = philox::philox4x32({{in[0], in[1], in[2], in[3]}}, in[4], in[5]);
        memcpy(out, words.w, sizeof words.w);
    }},
    {"stochastic::grid_step", 1, 1, [](In in, Out out) { out[0] = word(stochastic::grid_step(from_bits(in[0]))); }},
    {"stochastic::encode", 3, 1, [](In in, Out out) { out[0] = stochastic::encode(from_bits(in[0]), in[1], (Specials)in[2]); }},
    {"stochastic::block", 6, 4, [](In in, Out out) {
        philox::Words words = stochastic::block(wide(in), wide(in + 2), wide(in + 4));
        memcpy(out, words.w, sizeof words.w);
    }},
    {"hadamard::transform", 17, 16, [](In in, Out out) {
        float v[BLOCK];
        floats(in, v, BLOCK);
        hadamard::transform(v, in[BLOCK]);
        for (int i = 0; i < BLOCK; i++) out[i] = word(v[i]);
    }},
    {"four_over_six::candidate_scales", 4, 2, [](In in, Out out) {
        four_over_six::Pair pair = four_over_six::candidate_scales(from_bits(in[3]), global(in), (Specials)in[2]);
        out[0] = pair.six, out[1] = pair.four;
    }},
    // amax, 6E, specials, metric, error path, byte, 16 elements
    {"four_over_six::row_error", 22, 1, [](In in, Out out) {
        float x[BLOCK];
        floats(in + 6, x, BLOCK);
        out[0] = word(four_over_six::row_error(x, in[5], global(in), (Metric)in[3], (ErrorPath)in[4], (Specials)in[2]));
    }},
    // stride, 16 errors
    {"four_over_six::sum_rows", 17, 1, [](In in, Out out) {
        std::vector<float> rows(BLOCK * in[0], -1.0f);
        for (int j = 0; j < BLOCK; j++) rows[j * in[0]] = from_bits(in[1 + j]);
        out[0] = word(four_over_six::sum_rows(rows.data(), (int)in[0]));
    }},
    {"swizzle::offset", 6, 2, [](In in, Out out) {
        u64 offset = swizzle::offset(wide(in), wide(in + 2), wide(in + 4));
        out[0] = (u32)offset, out[1] = (u32)(offset >> 32);
    }},
    {"e8m0::decode", 1, 1, [](In in, Out out) { out[0] = word(e8m0::decode(in[0])); }},
    {"e8m0::reciprocal", 1, 1, [](In in, Out out) { out[0] = word(e8m0::reciprocal(in[0])); }},
    {"e8m0::encode_up", 1, 1, [](In in, Out out) { out[0] = e8m0::encode_up(from_bits(in[0])); }},
    {"fp8::max", 1, 1, [](In in, Out out) { out[0] = word(fp8::max((Format)in[0])); }},
    {"fp8::encode", 2, 1, [](In in, Out out) { out[0] = fp8::encode(from_bits(in[0]), (Format)in[1]); }},
    {"fp8::encode_four", 5, 1, [](In in, Out out) {
        float x[4];
        floats(in, x, 4);
        out[0] = fp8::encode_four(x[0], x[1], x[2], x[3], (Format)in[4]);
    }},
    {"fp8::decode", 2, 1, [](In in, Out out) { out[0] = word(fp8::decode(in[0], (Format)in[1])); }},
    {"fp8::decode_four", 2, 4, [](In in, Out out) {
        float x[4];
        fp8::decode_four(in[0], (Format)in[1], x);
        for (int i = 0; i < 4; i++) out[i] = word(x[i]);
    }},
    // amax, format, scale values, epsilon, precision
    {"fp8::scale", 5, 1, [](In in, Out out) {
        float overflow = precision::max((Precision)in[4]);
        out[0] = word(fp8::scale(from_bits(in[0]), (Format)in[1], (ScaleValues)in[2], from_bits(in[3]), overflow));
    }},
    {"fp8::mx_byte", 2, 1, [](In in, Out out) { out[0] = fp8::mx_byte(from_bits(in[0]), (Format)in[1]); }},
    // largest, algorithm, whether bulk, reduced, scale, length, 4 amaxes of two tensors side by
    // side: the first one's is updated
    {"fp8::update", 14, 9, [](In in, Out out) {
        float history[8];
        floats(in + 6, history, 8);
        float scale = fp8::update(history, in[5], 2, from_bits(in[4]), from_bits(in[0]), (Algorithm)in[1], in[2] != 0,
                                  from_bits(in[3]));
        out[0] = word(scale);
        for (int i = 0; i < 8; i++) out[1 + i] = word(history[i]);
    }},
    {"quantize 1x16", 8 + 16 + 4, 1 + 16, quantize<1>},
    {"quantize 16x16", 8 + 256 + 64, 1 + 256, quantize<16>},
};

int main(int argc, char** argv) {
    for (const Function& f : FUNCTIONS) {
        if (argc != 2 || strcmp(f.name, argv[1]) != 0) continue;
        std::vector<u32> in(f.inputs), out(f.outputs), results;
        size_t got;
        while ((got = fread(in.data(), sizeof(u32), in.size(), stdin)) == in.size()) {
            f.call(in.data(), out.data());
            results.insert(results.end(), out.begin(), out.end());
        }
        if (got != 0) return fprintf(stderr, "the last record is short\n"), 1;
        return fwrite(results.data(), sizeof(u32), results.size(), stdout) == results.size() ? 0 : 1;
    }
    return fprintf(stderr, "no such function\n"), 1;
}
