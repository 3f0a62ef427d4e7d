//! A number that tells contents apart and is the same for all time.

/// FNV-1a of 64 bits. The standard library's hash may change with its version; this one does not.
pub fn fingerprint(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of the hash's authors.
    #[test]
    fn it_is_fnv1a() {
        for (text, hash) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(fingerprint(text.bytes()), hash, "{text}");
        }
    }
}
