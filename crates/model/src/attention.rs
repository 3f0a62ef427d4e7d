//! Attention of one layer: grouped heads, rotated positions, windows, sinks, soft caps.

use crate::config::Config;
use crate::linear::{KeysValues, Linear, Run};
use crate::norm::Norm;
use crate::rope::Rope;
use crate::source::Source;
use crate::{Result, refused};
use nvfp4_kernels::gemm::baseline;
use nvfp4_spec::e4m3;
use rayon::prelude::*;

/// Queries that are scored at a time.
const QUERIES: usize = 256;

/// How queries, keys and values are projected.
enum Inputs {
    Apart(Box<[Linear; 3]>),
    /// Phi-3's, in one matrix.
    Joined(Linear),
}

/// The attention of a layer.
pub struct Attention {
    module: String,
    inputs: Inputs,
    output: Linear,
    query_norm: Option<Norm>,
    key_norm: Option<Norm>,
    sinks: Option<Vec<f32>>,
    rope: Rope,
    window: Option<usize>,
    /// The scales of keys and values, where the checkpoint keeps them in FP8.
    cache_scales: Option<(f32, f32)>,
    shape: Shape,
}

/// Heads and the numbers of scores.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    scale: f32,
    cap: Option<f32>,
}

/// Keys and values of earlier tokens, `[tokens, heads, dim]` each.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Attention {
    /// Reads the attention of a layer.
    pub fn read(source: &Source<'_>, layer: usize) -> Result<Self> {
        let config: &Config = source.config();
        let module = source.name(&format!("layers.{layer}.self_attn"));
        let name = |part: &str| format!("{module}.{part}");
        let (dim, hidden) = (config.head_dim, config.hidden);
        let (queries, keys) = (config.heads * dim, config.kv_heads * dim);
        let inputs = match source.find(&name("qkv_proj")) {
            Some(_) => Inputs::Joined(source.linear(&name("qkv_proj"), queries + 2 * keys, hidden)?),
            None => Inputs::Apart(Box::new([
                source.linear(&name("q_proj"), queries, hidden)?,
                source.linear(&name("k_proj"), keys, hidden)?,
                source.linear(&name("v_proj"), keys, hidden)?,
            ])),
        };
        let (window, rope) = config.positions_of(layer);
        let scale = |name: &str| -> Result<f32> {
            let (outer, inner) = (format!("{module}.{name}_scale"), format!("{module}.{name}_proj.{name}_scale"));
            let found = source.vector(&inner)?.or(source.vector(&outer)?).unwrap_or(vec![1.0]);
            match found[..] {
                [scale] if scale.is_finite() && scale > 0.0 => Ok(scale),
                _ => Err(refused(format!("'{inner}' is not a positive number"))),
            }
        };
        let cache_scales = source.keeps_fp8().then(|| Ok::<_, crate::Error>((scale("k")?, scale("v")?))).transpose()?;
        let sinks = name("sinks");
        let sinks = source.vector(&sinks)?.map(|_| source.need_vector(&sinks, config.heads)).transpose()?;
        Ok(Attention {
            output: source.linear(&name("o_proj"), hidden, queries)?,
            query_norm: Norm::find(source, &name("q_norm"), dim)?,
            key_norm: Norm::find(source, &name("k_norm"), dim)?,
            sinks,
            rope: rope.clone(),
            window,
            cache_scales,
            shape: Shape {
                heads: config.heads,
                kv_heads: config.kv_heads,
                dim,
                scale: config.attention_scale,
                cap: config.attention_cap,
            },
            inputs,
            module,
        })
    }

    /// Outputs for the normed states of tokens that follow those in the cache, in a context of
    /// `length`. The cache gets theirs.
    pub fn apply(&self, x: &[f32], cache: &mut Cache, length: usize, run: &Run<'_>) -> Result<Vec<f32>> {
        let Shape { heads, kv_heads, dim, .. } = self.shape;
        let [mut queries, mut keys, mut values] = self.project(x, run)?;
        if let Some(norm) = &self.query_norm {
            norm.apply(&mut queries);
        }
        if let Some(norm) = &self.key_norm {
            norm.apply(&mut keys);
        }
        let (tokens, past) = (queries.len() / (heads * dim), cache.keys.len() / (kv_heads * dim));
        let angles = self.rope.angles(past, tokens, length);
        self.rope.rotate(&mut queries, heads, dim, &angles);
        self.rope.rotate(&mut keys, kv_heads, dim, &angles);
        run.watch.cached(&self.module, &keys, &values);
        if let (Some((key_scale, value_scale)), KeysValues::AsStored) = (self.cache_scales, run.keys_values) {
            to_fp8(&mut keys, key_scale);
            to_fp8(&mut values, value_scale);
        }
        cache.keys.extend(keys);
        cache.values.extend(values);
        let mixed = self.mix(&queries, cache, past);
        self.output.apply(&mixed, run)
    }

    fn project(&self, x: &[f32], run: &Run<'_>) -> Result<[Vec<f32>; 3]> {
        let Shape { heads, kv_heads, dim, .. } = self.shape;
        match &self.inputs {
            Inputs::Apart(apart) => {
                let [q, k, v] = &**apart;
                Ok([q.apply(x, run)?, k.apply(x, run)?, v.apply(x, run)?])
            }
            Inputs::Joined(all) => {
                let joined = all.apply(x, run)?;
                let part = |from: usize, len: usize| -> Vec<f32> {
                    joined.chunks_exact(all.outputs()).flat_map(|row| &row[from..from + len]).copied().collect()
                };
                let (queries, keys) = (heads * dim, kv_heads * dim);
                Ok([part(0, queries), part(queries, keys), part(queries + keys, keys)])
            }
        }
    }

    /// The values of all heads, weighted: `[tokens, heads · dim]`.
    fn mix(&self, queries: &[f32], cache: &Cache, past: usize) -> Vec<f32> {
        let Shape { heads, kv_heads, dim, .. } = self.shape;
        let (tokens, seen) = (queries.len() / (heads * dim), cache.keys.len() / (kv_heads * dim));
        let each = heads / kv_heads;
        let mixed: Vec<Vec<f32>> = (0..kv_heads)
            .into_par_iter()
            .flat_map_iter(|group| {
                let keys = gathered(&cache.keys, kv_heads, dim, group);
                let values = turned(&cache.values, kv_heads, dim, group, seen);
                (group * each..(group + 1) * each).map(move |head| {
                    let queries = gathered(queries, heads, dim, head);
                    self.head(head, &queries, &keys, &values, past)
                })
            })
            .collect();
        let mut out = vec![0.0; tokens * heads * dim];
        for (head, mixed) in mixed.iter().enumerate() {
            for (to, from) in out.chunks_exact_mut(heads * dim).zip(mixed.chunks_exact(dim)) {
                to[head * dim..(head + 1) * dim].copy_from_slice(from);
            }
        }
        out
    }

    /// The values of one head, weighted. `values` lie along tokens.
    fn head(&self, head: usize, queries: &[f32], keys: &[f32], values: &[f32], past: usize) -> Vec<f32> {
        let (dim, seen) = (self.shape.dim, keys.len() / self.shape.dim);
        let sink = self.sinks.as_ref().map(|sinks| sinks[head]);
        let mut out = vec![0.0; queries.len()];
        let (mut scores, mut first) = (Vec::new(), past);
        for (queries, out) in queries.chunks(QUERIES * dim).zip(out.chunks_mut(QUERIES * dim)) {
            let count = queries.len() / dim;
            scores.resize(count * seen, 0.0);
            baseline::f32(queries, keys, (count, seen, dim), &mut scores);
            for (i, scores) in scores.chunks_exact_mut(seen).enumerate() {
                let end = first + i + 1;
                let start = self.window.map_or(0, |window| end.saturating_sub(window));
                self.weigh(scores, start, end, sink);
            }
            baseline::f32(&scores, values, (count, dim, seen), out);
            first += count;
        }
        out
    }

    /// Scores become weights: those from `start` to `end` sum to 1, with the sink's where there is
    /// one; all others are 0.
    fn weigh(&self, scores: &mut [f32], start: usize, end: usize, sink: Option<f32>) {
        let Shape { scale, cap, .. } = self.shape;
        scores[..start].fill(0.0);
        scores[end..].fill(0.0);
        let seen = &mut scores[start..end];
        seen.iter_mut().for_each(|score| {
            *score *= scale;
            if let Some(cap) = cap {
                *score = (*score / cap).tanh() * cap;
            }
        });
        let most = seen.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        seen.iter_mut().for_each(|score| *score = (*score - most).exp());
        let sum: f64 =
            seen.iter().map(|&e| f64::from(e)).sum::<f64>() + sink.map_or(0.0, |sink| f64::from((sink - most).exp()));
        let inverse = (1.0 / sum) as f32;
        seen.iter_mut().for_each(|e| *e *= inverse);
    }
}

/// One head of `[tokens, heads, dim]`.
fn gathered(all: &[f32], heads: usize, dim: usize, head: usize) -> Vec<f32> {
    all.chunks_exact(heads * dim).flat_map(|row| &row[head * dim..(head + 1) * dim]).copied().collect()
}

/// One head of it, turned: `[dim, tokens]`.
fn turned(all: &[f32], heads: usize, dim: usize, head: usize, tokens: usize) -> Vec<f32> {
    let mut out = vec![0.0; dim * tokens];
    for (t, row) in all.chunks_exact(heads * dim).enumerate() {
        row[head * dim..(head + 1) * dim].iter().enumerate().for_each(|(d, &x)| out[d * tokens + t] = x);
    }
    out
}

/// Rounds to FP8 with this scale, and back.
fn to_fp8(values: &mut [f32], scale: f32) {
    values.par_chunks_mut(1 << 14).for_each(|values| {
        values.iter_mut().for_each(|x| *x = e4m3::decode(e4m3::encode(*x / scale)) * scale);
    });
}
