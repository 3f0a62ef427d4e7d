//! Writes outputs: applies the epilogue of [`nvfp4_spec::gemm::OutputScale`] to the sums of a few
//! columns, from any thread.

use crate::scatter::Scatter;
use nvfp4_spec::gemm::{Operand, OutputScale, Product};
use nvfp4_spec::{Element, GlobalScale};

/// The maximum number of sums in one call of [`Writer::write`].
pub(super) const MOST: usize = 32;

/// Both operands as the rules take them.
pub(super) type Operands<'a> = (Operand<'a>, Operand<'a>);

/// Writes the outputs of a product.
pub(super) struct Writer<'a, T> {
    operands: Operands<'a>,
    product: &'a Product<'a, T>,
    out: Scatter<'a, T>,
}

impl<'a, T: Element> Writer<'a, T> {
    pub fn new(operands: Operands<'a>, product: &'a Product<'a, T>, out: &'a mut [T]) -> Self {
        Writer { operands, product, out: Scatter::new(out) }
    }

    /// Writes outputs of row `i` from column `first` on, given their sums.
    ///
    /// # Safety
    ///
    /// No other thread may write the same outputs.
    pub unsafe fn write(&self, i: usize, first: usize, sums: &[f32]) {
        let ((a, b), product) = (&self.operands, self.product);
        let mut outputs = [T::default(); MOST];
        let outputs = &mut outputs[..sums.len()];
        let scale = |j: usize| OutputScale::new(product.epilogue, (a, i), (b, j));
        let one = (b.global() == GlobalScale::PerTensor).then(|| scale(0));
        let add = product.add.filter(|&(_, beta)| beta != 0.0);
        match (one, product.bias, add) {
            // The common case is separate, so that the compiler vectorizes it.
            (Some(one), None, None) => {
                outputs.iter_mut().zip(sums).for_each(|(y, &sum)| *y = one.finish(sum, product.alpha, None, None));
            }
            _ => {
                for (at, (y, &sum)) in outputs.iter_mut().zip(sums).enumerate() {
                    let j = first + at;
                    let c = add.map(|(c, beta)| (c[i * b.rows() + j], beta));
                    let bias = product.bias.map(|bias| bias[j]);
                    *y = one.unwrap_or_else(|| scale(j)).finish(sum, product.alpha, bias, c);
                }
            }
        }
        // SAFETY: the caller keeps other threads away from these outputs.
        unsafe { self.out.write(i * b.rows() + first, outputs) };
    }
}
