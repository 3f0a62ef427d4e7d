//! Random numbers for stochastic rounding: functions of (seed, offset, position), and a generator that hands out offsets.

use crate::{Error, Result};
use nvfp4_spec::Rounding;
use nvfp4_spec::stochastic::{OFFSETS_PER_CALL, Random, Stream};

/// Where one quantization takes its random numbers from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Randomness<'a> {
    /// The position-keyed stream: the row direction draws at `offset`, the column direction at `offset + 1`.
    At {
        /// The seed.
        seed: u64,
        /// The offset; a call consumes two, whichever directions it writes.
        offset: u64,
    },
    /// A stream for each direction, for slices of a larger tensor.
    Streams {
        /// For the row direction.
        row: Stream,
        /// For the column direction.
        col: Stream,
    },
    /// The caller's own bytes: 16 per block, blocks in row-major order of each direction. The bytes of a direction that is
    /// not asked for may be empty.
    Bytes {
        /// For the row direction.
        row: &'a [u8],
        /// For the column direction.
        col: &'a [u8],
    },
}

impl<'a> Randomness<'a> {
    pub(crate) fn row(&self) -> Rounding<Random<'a>> {
        Rounding::Stochastic(match *self {
            Randomness::At { seed, offset } => Random::Stream(Stream::row(seed, offset)),
            Randomness::Streams { row, .. } => Random::Stream(row),
            Randomness::Bytes { row, .. } => Random::Bytes(row),
        })
    }

    pub(crate) fn col(&self) -> Rounding<Random<'a>> {
        Rounding::Stochastic(match *self {
            Randomness::At { seed, offset } => Random::Stream(Stream::column(seed, offset)),
            Randomness::Streams { col, .. } => Random::Stream(col),
            Randomness::Bytes { col, .. } => Random::Bytes(col),
        })
    }
}

/// Hands out offsets that never overlap.
///
/// ```
/// use nvfp4::Generator;
///
/// let mut generator = Generator::new(42);
/// let first = generator.draw()?;
/// assert_ne!(first, generator.draw()?);
/// assert_eq!(generator.consumed(), 4);
///
/// let mut resumed = Generator::from_state(generator.state())?;
/// assert_eq!(resumed.draw()?, generator.draw()?);
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generator {
    seed: u64,
    start: u64,
    offset: u64,
    end: u64,
}

impl Generator {
    /// A generator over all offsets of a seed.
    pub fn new(seed: u64) -> Self {
        Generator { seed, start: 0, offset: 0, end: u64::MAX }
    }

    /// The randomness of one quantization.
    pub fn draw(&mut self) -> Result<Randomness<'static>> {
        let next =
            self.offset.checked_add(OFFSETS_PER_CALL).filter(|&next| next <= self.end).ok_or(Error::Exhausted)?;
        let offset = std::mem::replace(&mut self.offset, next);
        Ok(Randomness::At { seed: self.seed, offset })
    }

    /// How many offsets were handed out.
    pub fn consumed(&self) -> u64 {
        self.offset - self.start
    }

    /// The state: seed, first offset, next offset, end. [`Generator::from_state`] goes on from there.
    pub fn state(&self) -> [u64; 4] {
        [self.seed, self.start, self.offset, self.end]
    }

    /// A generator with a saved state.
    pub fn from_state([seed, start, offset, end]: [u64; 4]) -> Result<Self> {
        if !(start <= offset && offset <= end) {
            return Err(Error::GeneratorState { start, offset, end });
        }
        Ok(Generator { seed, start, offset, end })
    }

    /// Splits the offsets that are left evenly among workers, whose draws never overlap. Worker `i` of `n` gets the same
    /// share whenever the same state is split by `n`; with more workers than offsets every share is empty.
    ///
    /// ```
    /// use nvfp4::Generator;
    ///
    /// let third = Generator::new(42).split(8).nth(2).expect("one of eight");
    /// assert_eq!(third.state()[1], u64::MAX / 8 * 2);
    /// ```
    pub fn split(self, workers: usize) -> impl ExactSizeIterator<Item = Generator> {
        let share = (self.end - self.offset).checked_div(workers as u64).unwrap_or(0);
        (0..workers).map(move |i| {
            let start = self.offset + i as u64 * share;
            Generator { seed: self.seed, start, offset: start, end: start + share }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offset(randomness: Randomness<'_>) -> u64 {
        match randomness {
            Randomness::At { offset, .. } => offset,
            _ => unreachable!("generators hand out offsets"),
        }
    }

    #[test]
    fn draws_do_not_overlap() {
        let mut generator = Generator::new(1);
        let offsets: Vec<u64> = (0..3).map(|_| offset(generator.draw().unwrap())).collect();
        assert_eq!(offsets, [0, 2, 4], "each call uses its offset and the next");
        assert_eq!(generator.consumed(), 6);
    }

    #[test]
    fn a_saved_state_goes_on_where_it_was() {
        let mut generator = Generator::new(9);
        generator.draw().unwrap();
        let mut resumed = Generator::from_state(generator.state()).unwrap();
        assert_eq!(resumed.consumed(), 2);
        assert_eq!(resumed.draw().unwrap(), generator.draw().unwrap());
        assert_eq!(
            Generator::from_state([0, 5, 4, 9]).unwrap_err().to_string(),
            "not a generator's state: expected start ≤ offset ≤ end, got 5, 4, 9"
        );
    }

    #[test]
    fn workers_have_disjoint_shares() {
        let mut workers: Vec<Generator> = Generator::new(3).split(3).collect();
        let first: Vec<u64> = workers.iter_mut().map(|w| offset(w.draw().unwrap())).collect();
        let share = u64::MAX / 3;
        assert_eq!(first, [0, share, 2 * share]);
        assert!(workers.windows(2).all(|w| w[0].end <= w[1].start));
        assert_eq!(Generator::new(3).split(0).len(), 0);
    }

    #[test]
    fn a_used_generator_splits_what_it_has_left() {
        let mut generator = Generator::from_state([3, 10, 10, 34]).unwrap();
        generator.draw().unwrap();
        generator.draw().unwrap();
        let states: Vec<[u64; 4]> = generator.clone().split(3).map(|worker| worker.state()).collect();
        assert_eq!(states, [[3, 14, 14, 20], [3, 20, 20, 26], [3, 26, 26, 32]]);
        assert!(generator.split(3).all(|worker| worker.consumed() == 0));
    }

    #[test]
    fn any_number_of_workers_may_be_asked_for() {
        let mut workers = Generator::new(3).split(usize::MAX);
        assert_eq!(workers.len(), usize::MAX);
        assert_eq!(workers.next().unwrap().state(), [3, 0, 0, 1]);
        assert!(matches!(workers.next().unwrap().draw(), Err(Error::Exhausted)), "one offset is no draw");
    }

    #[test]
    fn an_exhausted_generator_says_so_and_stays_where_it_is() {
        let mut generator = Generator::from_state([0, 0, 7, 8]).unwrap();
        assert!(matches!(generator.draw(), Err(Error::Exhausted)));
        assert_eq!(generator.state(), [0, 0, 7, 8]);
        let mut last = Generator::from_state([0, 0, u64::MAX - 1, u64::MAX]).unwrap();
        assert!(matches!(last.draw(), Err(Error::Exhausted)));
    }
}
