//! Writes all logits of a small model: `logits FOLDER TOKENS.json OUT`, where the tokens are rows of
//! numbers and the logits little-endian binary32, position after position.

use nvfp4_model::{Decoder, Rows, Run, Source, logits, open};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, tokens, out] = &words[..] else { return Err("expected FOLDER TOKENS.json OUT".into()) };
    let tokens: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let checkpoint = open(Path::new(folder))?;
    let source = Source::new(&checkpoint, None)?;
    let (decoder, rows, stop) =
        (Decoder::new(&source), Rows::new(tokens.iter().map(|row| &row[..])), AtomicBool::new(false));
    let mut states = vec![decoder.embed(rows.tokens())?];
    for layer in 0..source.config().layers {
        decoder.advance(layer, &rows, &mut states, &[Run::AS_STORED], &stop)?;
    }
    let logits = logits(&decoder, states.remove(0))?;
    std::fs::write(out, logits.iter().flat_map(|z| z.to_le_bytes()).collect::<Vec<u8>>())?;
    Ok(())
}
