//! Formats and specs as text: what tables print is what rule files say. The grammar is in the documentation of [`QuantSpec`].

mod parse;
mod print;

use super::error::{Error, Result};
use super::keywords::*;
use super::spec::{ColumnSource, QuantSpec};
use super::{
    AmaxRule, BlockTile, Delayed, Epsilon, Family, Format, Fp8, Fp8Block, MxTile, Mxfp8, Name, Nvfp4, QuantizerBuilder,
    Reduction, ScaleStep, Stored, Transform,
};
use nvfp4_spec::ScaleRule;
use nvfp4_spec::hadamard::Signs;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

impl Serialize for QuantSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for QuantSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
