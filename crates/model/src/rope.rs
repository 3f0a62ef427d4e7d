//! Rotary positions: the frequencies of each scaling, and the rotation.
//!
//! Frequencies and angles are binary32, as transformers has them at any precision of the model.

use crate::fields::Fields;
use crate::{Result, refused};
use serde_json::Value;
use std::f64::consts::PI;

/// The rotation of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The angle per position of each pair of elements.
    frequencies: Vec<f32>,
    /// Those for contexts beyond `original`, where there are two.
    long: Option<(usize, Vec<f32>)>,
    /// What sines and cosines are multiplied by.
    factor: f32,
}

impl Rope {
    /// The rotations of a configuration: of all layers, and of those with a window where they
    /// differ.
    pub(crate) fn of(
        fields: &Fields<'_>,
        split: bool,
        head_dim: usize,
        positions: usize,
    ) -> Result<(Self, Option<Self>)> {
        let partial = fields.number("partial_rotary_factor")?.unwrap_or(1.0);
        let theta = fields.number("rope_theta")?;
        let parameters = fields.0.get("rope_parameters").filter(|value| value.is_object());
        let scaling = fields.0.get("rope_scaling").filter(|value| value.is_object());
        let own_positions = fields.number("original_max_position_embeddings")?;
        let make = |settings: Option<&Value>, theta: f64| {
            let empty = Value::Null;
            let settings = Scaling { fields: Fields(settings.unwrap_or(&empty)), original: own_positions };
            settings.rope(theta, partial, head_dim, positions)
        };
        let make = |settings: Option<&Value>, theta: f64| {
            let rope = make(settings, theta)?;
            let long = rope.long.iter().flat_map(|(_, long)| long);
            let finite = rope.frequencies.iter().chain(long).chain([&rope.factor]).all(|x| x.is_finite());
            finite.then_some(rope).ok_or_else(|| {
                refused("config.json: the angles of positions are not numbers; check 'rope_theta' and its scaling")
            })
        };
        let per_kind = parameters.and_then(|all| Some((all.get("full_attention")?, all.get("sliding_attention")?)));
        if let Some((full, local)) = per_kind {
            return Ok((make(Some(full), theta.unwrap_or(1e6))?, Some(make(Some(local), 1e4)?)));
        }
        if split {
            let local = fields.number("rope_local_base_freq")?.unwrap_or(1e4);
            return Ok((make(parameters.or(scaling), theta.unwrap_or(1e6))?, Some(make(None, local)?)));
        }
        Ok((make(parameters.or(scaling), theta.unwrap_or(1e4))?, None))
    }

    /// Cosines and sines of `count` positions from `start` on, of a context of `length`.
    pub fn angles(&self, start: usize, count: usize, length: usize) -> Vec<(f32, f32)> {
        let frequencies = match &self.long {
            Some((original, long)) if length > *original => long,
            _ => &self.frequencies,
        };
        let angle = |position: usize, frequency: f32| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            (cos * self.factor, sin * self.factor)
        };
        (start..start + count).flat_map(|position| frequencies.iter().map(move |&f| angle(position, f))).collect()
    }

    /// Pairs of elements that turn.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Turns heads of `dim` elements in place; `angles` has those of each position, which has
    /// `heads` of them.
    pub fn rotate(&self, values: &mut [f32], heads: usize, dim: usize, angles: &[(f32, f32)]) {
        let half = self.pairs();
        for (position, angles) in values.chunks_exact_mut(heads * dim).zip(angles.chunks_exact(half.max(1))) {
            for head in position.chunks_exact_mut(dim) {
                let (first, second) = head[..2 * half].split_at_mut(half);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

/// `rope_parameters` or `rope_scaling`.
struct Scaling<'a> {
    fields: Fields<'a>,
    /// The context that the model was trained with, where it stands outside.
    original: Option<f64>,
}

impl Scaling<'_> {
    fn need(&self, name: &str) -> Result<f64> {
        self.fields
            .number(name)?
            .ok_or_else(|| refused(format!("config.json: the scaling of positions has no '{name}'")))
    }

    fn rope(&self, theta: f64, partial: f64, head_dim: usize, positions: usize) -> Result<Rope> {
        let theta = self.fields.number("rope_theta")?.unwrap_or(theta);
        let partial = self.fields.number("partial_rotary_factor")?.unwrap_or(partial);
        let dim = (head_dim as f64 * partial) as usize;
        if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) {
            return Err(refused(format!("config.json: {dim} of {head_dim} elements of a head cannot turn")));
        }
        let plain: Vec<f64> = (0..dim / 2).map(|i| 1.0 / theta.powf(2.0 * i as f64 / dim as f64)).collect();
        let rounded = |frequencies: Vec<f64>| frequencies.into_iter().map(|f| f as f32).collect::<Vec<f32>>();
        let simple =
            |frequencies, factor: f64| Rope { frequencies: rounded(frequencies), long: None, factor: factor as f32 };
        let kind = self.fields.0.get("rope_type").or(self.fields.0.get("type")).and_then(Value::as_str);
        match kind.unwrap_or("default") {
            "default" => Ok(simple(plain, 1.0)),
            "linear" => {
                let factor = self.need("factor")?;
                Ok(simple(plain.into_iter().map(|f| f / factor).collect(), 1.0))
            }
            "llama3" => Ok(simple(self.llama3(plain)?, 1.0)),
            "yarn" => {
                let (frequencies, factor) = self.yarn(plain, theta, dim, positions)?;
                Ok(simple(frequencies, factor))
            }
            "longrope" | "su" => self.long(plain, positions),
            other => Err(refused(format!("config.json: the scaling of positions '{other}' is not run"))),
        }
    }

    /// Long waves are stretched, short ones are not, and between them it is blended.
    fn llama3(&self, plain: Vec<f64>) -> Result<Vec<f64>> {
        let (factor, low, high) = (self.need("factor")?, self.need("low_freq_factor")?, self.need("high_freq_factor")?);
        let original = self.need("original_max_position_embeddings")?;
        let scaled = |f: f64| {
            let wave = 2.0 * PI / f;
            if wave < original / high {
                f
            } else if wave > original / low {
                f / factor
            } else {
                let smooth = (original / wave - low) / (high - low);
                (1.0 - smooth) * f / factor + smooth * f
            }
        };
        Ok(plain.into_iter().map(scaled).collect())
    }

    /// Frequencies, and the factor of sines and cosines.
    fn yarn(&self, plain: Vec<f64>, theta: f64, dim: usize, positions: usize) -> Result<(Vec<f64>, f64)> {
        let fields = &self.fields;
        let original = fields.number("original_max_position_embeddings")?.or(self.original).unwrap_or(positions as f64);
        let factor = match fields.number("factor")? {
            Some(factor) => factor,
            None => positions as f64 / original,
        };
        let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 };
        let attention =
            match (fields.number("attention_factor")?, fields.number("mscale")?, fields.number("mscale_all_dim")?) {
                (Some(given), ..) => given,
                (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(factor, one) / mscale(factor, all),
                _ => mscale(factor, 1.0),
            };
        let (fast, slow) = (fields.number("beta_fast")?.unwrap_or(32.0), fields.number("beta_slow")?.unwrap_or(1.0));
        let at = |rotations: f64| dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (at(fast), at(slow));
        if fields.0.get("truncate").and_then(Value::as_bool) != Some(false) {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let blended = |(i, f): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        };
        Ok((plain.into_iter().enumerate().map(blended).collect(), attention))
    }

    /// Phi-3's: a factor per frequency, other ones for long contexts.
    fn long(&self, plain: Vec<f64>, positions: usize) -> Result<Rope> {
        let original = self.fields.number("original_max_position_embeddings")?.or(self.original);
        let original = original.unwrap_or(positions as f64);
        let factor = match self.fields.number("factor")? {
            Some(factor) => factor,
            None => positions as f64 / original,
        };
        let attention = match self.fields.number("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        let divided = |name: &str| -> Result<Vec<f32>> {
            let factors: Vec<f64> = self
                .fields
                .0
                .get(name)
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(Value::as_f64)
                .collect();
            if factors.len() != plain.len() {
                let (got, expected) = (factors.len(), plain.len());
                return Err(refused(format!("config.json: '{name}' has {got} numbers; expected {expected}")));
            }
            Ok(plain.iter().zip(factors).map(|(f, by)| (f / by) as f32).collect())
        };
        let long = Some((original as usize, divided("long_factor")?));
        Ok(Rope { frequencies: divided("short_factor")?, long, factor: attention as f32 })
    }
}
