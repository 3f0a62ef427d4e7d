//! Writes what goes into and comes out of every linear layer of a small model, as its checkpoint says that it is
//! run: `layers FOLDER TOKENS.json OUT.safetensors`, where the tokens are rows of numbers. A layer `X` has the
//! tensors `X.input` and `X.output`, without its bias, call after call.

use nvfp4_model::{Activations, Decoder, KeysValues, Rows, Run, Source, Watch, open};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Numbers of a tensor, in rows of a width.
#[derive(Default)]
struct Kept {
    cols: usize,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Dump(Mutex<BTreeMap<String, Kept>>);

impl Dump {
    fn keep(&self, name: String, values: &[f32], cols: usize) {
        let mut all = self.0.lock().expect("no holder panics");
        let kept = all.entry(name).or_default();
        kept.cols = cols;
        kept.bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    }
}

impl Watch for Dump {
    fn input(&self, module: &str, x: &[f32], cols: usize) {
        self.keep(format!("{module}.input"), x, cols);
    }

    fn output(&self, module: &str, y: &[f32], cols: usize) {
        self.keep(format!("{module}.output"), y, cols);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, tokens, out] = &words[..] else { return Err("expected FOLDER TOKENS.json OUT.safetensors".into()) };
    let tokens: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let checkpoint = open(Path::new(folder))?;
    let source = Source::new(&checkpoint, None)?;
    let (decoder, rows) = (Decoder::new(&source), Rows::new(tokens.iter().map(|row| &row[..])));
    let (dump, stop) = (Dump::default(), AtomicBool::new(false));
    let run = Run { activations: Activations::AsStored, keys_values: KeysValues::AsStored, watch: &dump };
    let mut states = vec![decoder.embed(rows.tokens())?];
    for layer in 0..source.config().layers {
        decoder.advance(layer, &rows, &mut states, &[run], &stop)?;
    }
    let kept = dump.0.into_inner().expect("no holder panics");
    let view = |kept: &Kept| vec![kept.bytes.len() / 4 / kept.cols, kept.cols];
    let views = kept.iter().map(|(name, kept)| Ok((name, TensorView::new(Dtype::F32, view(kept), &kept.bytes)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(safetensors::serialize_to_file(views, None, Path::new(out))?)
}
