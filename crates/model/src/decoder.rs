//! A decoder, a layer at a time, over the hidden states of all tokens.

use crate::attention::{Attention, Cache};
use crate::config::Norms;
use crate::linear::Run;
use crate::mlp::{Mlp, ROWS};
use crate::norm::Norm;
use crate::source::Source;
use crate::{Error, Result, refused};
use nvfp4_checkpoint::{Buffer, Weight};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows of tokens, each a context of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    tokens: Vec<u32>,
    ends: Vec<usize>,
}

impl Rows {
    /// These rows.
    pub fn new<'t>(rows: impl IntoIterator<Item = &'t [u32]>) -> Self {
        let mut all = Rows { tokens: Vec::new(), ends: Vec::new() };
        for row in rows {
            all.tokens.extend_from_slice(row);
            all.ends.push(all.tokens.len());
        }
        all
    }

    /// All tokens, row after row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where each row lies among them.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }

    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// The longest row.
    pub fn longest(&self) -> usize {
        self.ranges().map(|range| range.len()).max().unwrap_or(0)
    }

    /// The row and the place in it of a token.
    fn place(&self, token: usize) -> (usize, usize) {
        let row = self.ends.partition_point(|&end| end <= token);
        (row, token - if row == 0 { 0 } else { self.ends[row - 1] })
    }
}

/// The norms of a layer.
struct LayerNorms {
    before_attention: Norm,
    after_attention: Option<Norm>,
    before_mlp: Norm,
    after_mlp: Option<Norm>,
}

/// A layer that is in memory as a whole, for generation.
pub struct Layer {
    norms: LayerNorms,
    attention: Attention,
    mlp: Mlp,
}

/// A decoder of a checkpoint.
pub struct Decoder<'s, 'a> {
    source: &'s Source<'a>,
}

impl<'s, 'a> Decoder<'s, 'a> {
    /// The decoder of a checkpoint.
    pub fn new(source: &'s Source<'a>) -> Self {
        Decoder { source }
    }

    /// What it is read from.
    pub fn source(&self) -> &'s Source<'a> {
        self.source
    }

    /// The embeddings of tokens.
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (config, name) = (self.source.config(), self.source.name("embed_tokens"));
        let weight = self.source.weight(&name)?;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= config.vocabulary) {
            let known = config.vocabulary;
            return Err(refused(format!(
                "the text has the token {token}, but the model knows {known}; tokenizer.json and config.json are not of \
                 one model"
            )));
        }
        let mut places: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        tokens.iter().enumerate().for_each(|(i, &token)| places.entry(token).or_default().push(i));
        let (mut out, mut buffer, hidden) = (vec![0.0; tokens.len() * config.hidden], Buffer::default(), config.hidden);
        for (token, places) in places {
            let values = weight.values(token as usize..token as usize + 1, &mut buffer)?;
            let row: Vec<f32> = (0..hidden).map(|i| values.get(i) * config.embedding_scale).collect();
            if row.iter().any(|x| !x.is_finite()) {
                return Err(refused(format!(
                    "'{name}' has numbers that are not finite for token {token}; it is damaged"
                )));
            }
            places.iter().for_each(|&i| out[i * hidden..(i + 1) * hidden].copy_from_slice(&row));
        }
        Ok(out)
    }

    fn norms(&self, layer: usize) -> Result<LayerNorms> {
        let (source, width) = (self.source, self.source.config().hidden);
        let read = |part: &str| Norm::read(source, &source.name(&format!("layers.{layer}.{part}")), width);
        Ok(match source.config().norms {
            Norms::Before => LayerNorms {
                before_attention: read("input_layernorm")?,
                after_attention: None,
                before_mlp: read("post_attention_layernorm")?,
                after_mlp: None,
            },
            Norms::Around => LayerNorms {
                before_attention: read("input_layernorm")?,
                after_attention: Some(read("post_attention_layernorm")?),
                before_mlp: read("pre_feedforward_layernorm")?,
                after_mlp: Some(read("post_feedforward_layernorm")?),
            },
        })
    }

    /// Takes hidden states through a layer, each in its way to run it. Weights are read once.
    pub fn advance(
        &self,
        layer: usize,
        rows: &Rows,
        states: &mut [Vec<f32>],
        runs: &[Run<'_>],
        stop: &AtomicBool,
    ) -> Result<()> {
        let (norms, hidden) = (self.norms(layer)?, self.source.config().hidden);
        let attention = Attention::read(self.source, layer)?;
        for (state, run) in states.iter_mut().zip(runs) {
            for range in rows.ranges() {
                go_on(stop)?;
                let state = &mut state[range.start * hidden..range.end * hidden];
                let normed = norms.before_attention.of(state);
                let added = attention.apply(&normed, &mut Cache::default(), range.len(), run)?;
                add(state, added, norms.after_attention.as_ref());
            }
            self.check(state, rows, layer, "self_attn")?;
        }
        drop(attention);
        go_on(stop)?;
        let mlp = Mlp::read(self.source, layer)?;
        match &mlp {
            Mlp::Dense(mlp) => {
                for (state, run) in states.iter_mut().zip(runs) {
                    for part in state.chunks_mut(ROWS * hidden) {
                        go_on(stop)?;
                        add(part, mlp.apply(&norms.before_mlp.of(part), run)?, norms.after_mlp.as_ref());
                    }
                }
            }
            Mlp::Experts(router) => {
                let normed: Vec<Vec<f32>> = states.iter().map(|state| norms.before_mlp.of(state)).collect();
                let added = router.apply(self.source, &normed, runs)?;
                states.iter_mut().zip(added).for_each(|(state, added)| add(state, added, norms.after_mlp.as_ref()));
            }
        }
        for state in states.iter() {
            self.check(state, rows, layer, "mlp")?;
        }
        go_on(stop)
    }

    /// Reads a layer as a whole; experts are read when they are needed.
    pub fn layer(&self, layer: usize) -> Result<Layer> {
        Ok(Layer {
            norms: self.norms(layer)?,
            attention: Attention::read(self.source, layer)?,
            mlp: Mlp::read(self.source, layer)?,
        })
    }

    /// Takes the states of tokens that follow those in the cache through a layer.
    pub fn step(
        &self,
        layer: &Layer,
        state: &mut [f32],
        cache: &mut Cache,
        length: usize,
        run: &Run<'_>,
    ) -> Result<()> {
        let normed = layer.norms.before_attention.of(state);
        add(state, layer.attention.apply(&normed, cache, length, run)?, layer.norms.after_attention.as_ref());
        let normed = layer.norms.before_mlp.of(state);
        let added = match &layer.mlp {
            Mlp::Dense(mlp) => mlp.apply(&normed, run)?,
            Mlp::Experts(router) => router.apply(self.source, &[normed], &[*run])?.remove(0),
        };
        add(state, added, layer.norms.after_mlp.as_ref());
        Ok(())
    }

    /// The norm before logits.
    pub fn last_norm(&self) -> Result<Norm> {
        Norm::read(self.source, &self.source.name("norm"), self.source.config().hidden)
    }

    /// The weight that logits are made with.
    pub fn head(&self) -> Result<&'s Weight<'a>> {
        let source = self.source;
        let own = ["lm_head".to_string(), "language_model.lm_head".to_string(), source.name("lm_head")];
        let head = match own.iter().find_map(|name| source.find(name)) {
            Some(head) if !source.config().tied => head,
            None if !source.config().tied => {
                return Err(refused(
                    "the checkpoint has no 'lm_head', and config.json does not tie it to the embeddings",
                ));
            }
            _ => source.weight(&source.name("embed_tokens"))?,
        };
        let (vocabulary, hidden) = (source.config().vocabulary, source.config().hidden);
        if head.cols != hidden || head.rows < vocabulary {
            let (module, rows, cols) = (&head.module, head.rows, head.cols);
            return Err(refused(format!(
                "'{module}' is {rows} × {cols}; config.json asks for {vocabulary} × {hidden}"
            )));
        }
        Ok(head)
    }

    /// An error that names the layer if a state is not finite.
    fn check(&self, state: &[f32], rows: &Rows, layer: usize, part: &str) -> Result<()> {
        let Some(at) = state.iter().position(|x| !x.is_finite()) else { return Ok(()) };
        let (row, place) = rows.place(at / self.source.config().hidden);
        let module = self.source.name(&format!("layers.{layer}.{part}"));
        let root = self.source.model().checkpoint.root().display();
        Err(refused(format!(
            "{root}: '{module}' gives {} for token {place} of row {row}; its weights, or an activation scale, are damaged",
            state[at]
        )))
    }
}

/// Adds what a part of a layer gives to the state, normed where the family does.
fn add(state: &mut [f32], mut added: Vec<f32>, norm: Option<&Norm>) {
    if let Some(norm) = norm {
        norm.apply(&mut added);
    }
    state.iter_mut().zip(added).for_each(|(x, y)| *x += y);
}

/// An error when somebody asked to stop.
pub(crate) fn go_on(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}
