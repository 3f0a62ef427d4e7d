//! From text to tokens: its bytes, or pairs that were found to be frequent in it (byte-pair
//! encoding).

use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vocabulary {
    /// A byte.
    Bytes,
    /// One of these many: all bytes, and the pairs of tokens that were most frequent.
    Pairs(usize),
}

const BYTES: usize = 256;
const MOST: usize = 1 << 16;

impl Vocabulary {
    /// How many tokens there are.
    pub fn size(self) -> usize {
        match self {
            Vocabulary::Bytes => BYTES,
            Vocabulary::Pairs(size) => size,
        }
    }

    /// The tokens of a text.
    pub fn encode(self, text: &[u8]) -> Result<Vec<u32>> {
        match self {
            Vocabulary::Bytes => Ok(text.iter().map(|&byte| u32::from(byte)).collect()),
            Vocabulary::Pairs(size) => encode(text, size),
        }
    }
}

/// Merges the most frequent pair, again and again. Pairs do not reach over the beginning of a word,
/// so each different word is worked on once. Of equally frequent pairs the one with the smaller
/// numbers is taken.
fn encode(text: &[u8], size: usize) -> Result<Vec<u32>> {
    let pieces = words(text);
    let mut counts: BTreeMap<&[u8], u64> = BTreeMap::new();
    pieces.iter().for_each(|piece| *counts.entry(piece).or_default() += 1);
    let mut words: Vec<(Vec<u32>, u64)> =
        counts.iter().map(|(word, &count)| (word.iter().map(|&byte| u32::from(byte)).collect(), count)).collect();
    for new in BYTES..size {
        let mut pairs: HashMap<(u32, u32), u64> = HashMap::new();
        for (word, count) in &words {
            word.windows(2).for_each(|pair| *pairs.entry((pair[0], pair[1])).or_default() += count);
        }
        let best = pairs
            .into_iter()
            .filter(|&(_, count)| count > 1)
            .max_by_key(|&((a, b), n)| (n, u32::MAX - a, u32::MAX - b));
        let Some((pair, _)) = best else {
            anyhow::bail!("--vocab {size}: the text makes only {new} tokens; take a smaller number or a longer text");
        };
        words.iter_mut().for_each(|(word, _)| merge(word, pair, new as u32));
    }
    let encoded: HashMap<&[u8], Vec<u32>> = counts.into_keys().zip(words.into_iter().map(|(word, _)| word)).collect();
    Ok(pieces.iter().flat_map(|piece| encoded[piece].iter().copied()).collect())
}

/// A text as words, each with the space before it.
fn words(text: &[u8]) -> Vec<&[u8]> {
    let begins = |i: usize| {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte >= 0x80;
        let (before, here) = (text[i - 1], text[i]);
        here == b' ' || (letter(here) != letter(before) && before != b' ')
    };
    let mut starts: Vec<usize> = (1..text.len()).filter(|&i| begins(i)).collect();
    starts.insert(0, 0);
    starts.push(text.len());
    starts.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect()
}

fn merge(word: &mut Vec<u32>, pair: (u32, u32), new: u32) {
    let (mut read, mut written) = (0, 0);
    while read < word.len() {
        let found = read + 1 < word.len() && (word[read], word[read + 1]) == pair;
        word[written] = if found { new } else { word[read] };
        read += if found { 2 } else { 1 };
        written += 1;
    }
    word.truncate(written);
}

impl FromStr for Vocabulary {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "bytes" {
            return Ok(Vocabulary::Bytes);
        }
        let size = text.parse::<usize>().ok().filter(|size| (BYTES + 1..=MOST).contains(size));
        ensure!(size.is_some(), "expected bytes, or a number of tokens from {} to {MOST}, got '{text}'", BYTES + 1);
        Ok(Vocabulary::Pairs(size.unwrap_or(BYTES)))
    }
}

impl fmt::Display for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Vocabulary::Bytes => f.write_str("bytes"),
            Vocabulary::Pairs(size) => size.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_pairs_become_tokens() {
        // "ab" is there three times; then " ab" and "abc" twice each, of which a space is the
        // smaller number.
        assert_eq!(Vocabulary::Pairs(258).encode(b"abc abc ab").unwrap(), [256, 99, 257, 99, 257]);
        let words = words(b"it is, he said,\n  so");
        assert_eq!(words, [&b"it"[..], b" is", b",", b" he", b" said", b",\n", b" ", b" so"]);
    }

    #[test]
    fn no_byte_is_lost() {
        let text = "Überall, überall: the cat sat on the mat; the mat sat.\n\n  Thus.".as_bytes();
        assert_eq!(words(text).concat(), text);
        let tokens = Vocabulary::Pairs(260).encode(text).unwrap();
        assert!(tokens.len() < text.len());
        assert_eq!(Vocabulary::Bytes.encode(text).unwrap().len(), text.len());
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!("256".parse::<Vocabulary>().is_err() && "pairs".parse::<Vocabulary>().is_err());
        assert!(Vocabulary::Pairs(1000).encode(b"abc abc").unwrap_err().to_string().contains("smaller number"));
    }
}
