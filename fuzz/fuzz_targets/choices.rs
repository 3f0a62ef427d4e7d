//! Choices that the fuzzer's bytes make: from small lists, so that most inputs are nearly right and deep code is reached.

/// Computes on the fuzzer's own thread: waking others takes longer than what there is to do.
pub fn on_this_thread() {
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
    alone.build_global().expect("the first pool");
}

/// Bytes that choose. When they are used up, everything is the first of its list.
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[usize::from(self.byte()) % list.len()].clone()
    }

    /// Something in one of 16 cases.
    pub fn seldom(&mut self) -> bool {
        self.byte() % 16 == 15
    }

    /// Changes some bytes of a file that is otherwise right: at a position, to a value, until the choices end or after 8.
    pub fn damage(&mut self, file: &mut Vec<u8>) {
        for _ in 0..8 {
            let [low, high, value] = [self.byte(), self.byte(), self.byte()];
            if [low, high, value] == [0; 3] || file.is_empty() {
                return;
            }
            let at = usize::from(u16::from_le_bytes([low, high])) % file.len();
            match value {
                0xFE => file.truncate(at),
                0xFF => file.insert(at, low),
                _ => file[at] = value,
            }
        }
    }
}
