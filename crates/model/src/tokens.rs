//! Text as tokens, by `tokenizer.json`.

use crate::decoder::Rows;
use crate::{Result, refused};
use nvfp4_files::regular;
use std::path::Path;
use tokenizers::Tokenizer;

/// The largest `tokenizer.json` that is read.
const LARGEST: u64 = 256 << 20;

/// A model's tokenizer.
pub struct Tokens {
    tokenizer: Tokenizer,
}

impl Tokens {
    /// Reads the tokenizer of a model's folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Err(refused(format!(
                "{}: there is no tokenizer.json; copy it from the original model",
                folder.display()
            )));
        }
        let bytes = regular::read(&path, LARGEST)?;
        let tokenizer = Tokenizer::from_bytes(bytes);
        let tokenizer = tokenizer.map_err(|error| refused(format!("{}: {error}", path.display())))?;
        Ok(Tokens { tokenizer })
    }

    /// The tokens of a text, without those that begin or end one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    /// The tokens that every text begins with.
    pub fn beginning(&self) -> Result<Vec<u32>> {
        let (with, without) = (self.ids("a", true)?, self.ids("a", false)?);
        let start = with.windows(without.len().max(1)).position(|part| part == without).unwrap_or(0);
        Ok(with[..start].to_vec())
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(|error| refused(format!("tokenizer.json: {error}")))
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoded = self.tokenizer.encode_fast(text, special);
        Ok(encoded.map_err(|error| refused(format!("tokenizer.json: {error}")))?.get_ids().to_vec())
    }

    /// A text as rows of at most `context` tokens, each with the beginning of a text; at most so
    /// many of them. The last may be shorter.
    pub fn rows(&self, text: &str, context: usize, most: Option<usize>) -> Result<(Rows, usize)> {
        let (beginning, tokens) = (self.beginning()?, self.encode(text)?);
        if context < beginning.len() + 2 {
            return Err(refused(format!("a context of {context} has nothing to predict; take a longer one")));
        }
        let each = context - beginning.len();
        let chunks =
            tokens.chunks(each).take(most.unwrap_or(usize::MAX)).filter(|row| beginning.len() + row.len() >= 2);
        let rows: Vec<Vec<u32>> = chunks.map(|row| beginning.iter().chain(row).copied().collect()).collect();
        if rows.is_empty() {
            let count = tokens.len();
            return Err(refused(format!("the text has {count} tokens, and nothing to predict; take a longer one")));
        }
        // What begins a text is given, not predicted.
        Ok((Rows::new(rows.iter().map(|row| &row[..])), beginning.len().saturating_sub(1)))
    }
}
