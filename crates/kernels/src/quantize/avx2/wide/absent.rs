//! What stands for [`super::wide`] on ARM, which has no vectors of 512 bits: nothing that can be
//! made.

use super::column::Submatrix;
use super::cuts::Table;
use super::target::ColContext;
use crate::avx512::Avx512;
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{BLOCK, Element};

pub(super) enum Columns {}

pub(super) struct Strip;

impl Strip {
    pub fn new() -> Self {
        Strip
    }

    pub fn resize(&mut self, _: usize, _: usize) {}
}

impl Columns {
    pub fn new<T: Element>(token: Option<Avx512>, _: &ColContext<'_>) -> Option<Self> {
        token.map(|token| match token {})
    }

    pub fn panel(&self, _: usize, _: bool) -> (usize, usize) {
        match *self {}
    }

    pub fn band<T: Element>(&self, _: &Submatrix<'_, T>, _: &ColContext<'_>, _: usize, _: &mut Strip) {
        match *self {}
    }

    pub fn write(&self, _: &mut Strip, _: (usize, usize), _: (usize, usize), _: usize, _: &ColContext<'_>) {
        match *self {}
    }
}

pub(super) enum Lookup {}

impl Lookup {
    pub fn new(token: Avx512) -> Self {
        match token {}
    }

    pub fn set<T: Element>(&mut self, _: &Table) -> bool {
        match *self {}
    }

    pub unsafe fn quantize<T: Element>(
        &self,
        _: &[[T; BLOCK]],
        _: &Table,
        _: &mut [u8],
        _: &mut [u8],
        _: &mut Vec<usize>,
    ) {
        match *self {}
    }
}

pub(super) fn largest<T: Element>(token: Avx512, _: &Submatrix<'_, T>, _: Signs) -> Option<f32> {
    match token {}
}

pub(super) mod direct {
    use crate::avx512::Avx512;
    use nvfp4_spec::scale::Global;
    use nvfp4_spec::scaling::Scaling;
    use nvfp4_spec::{BLOCK, Element};

    pub fn computes(token: Avx512, _: &Scaling) -> bool {
        match token {}
    }

    pub fn nearest<T: Element>(token: Avx512, _: &[[T; BLOCK]], _: &[u8], _: &Global, _: &mut [u8]) {
        match token {}
    }

    pub fn stochastic<T: Element>(
        token: Avx512,
        _: &[[T; BLOCK]],
        _: &[u8],
        _: &[[u8; BLOCK]],
        _: &Global,
        _: &mut [u8],
    ) {
        match token {}
    }

    pub fn magnitudes<T: Element>(token: Avx512, _: &[T], _: (usize, usize), _: &mut [u32], _: u32) -> bool {
        match token {}
    }
}

pub(super) mod four_over_six {
    use crate::avx512::Avx512;
    use crate::quantize::avx2::four_over_six::Tiles;
    use nvfp4_spec::scale::Global;
    use nvfp4_spec::{Element, ErrorPath};

    pub fn choose<T: Element, const MAE: bool>(
        token: Avx512,
        _: (&Global, ErrorPath),
        _: &[u32],
        _: &Tiles<'_, T>,
        _: &mut [u8],
        _: &mut Vec<usize>,
    ) {
        match token {}
    }
}

pub(super) mod philox {
    use crate::avx512::Avx512;
    use nvfp4_spec::BLOCK;
    use nvfp4_spec::stochastic::Stream;

    pub fn fill(token: Avx512, _: &Stream, _: u64, _: &mut [[u8; BLOCK]]) {
        match token {}
    }
}
