package main

// decode returns a response as text, and where its last token is. The demo's tokenizer has a token for each byte: first
// those that GPT-2 prints as themselves, then the others. Ids from 256 on are special.
func decode(tokens, mask []int64) (string, int) {
	var text []byte
	last := 0
	for at, token := range tokens {
		if mask[at] == 1 {
			last = at
		}
		if mask[at] == 1 && token < int64(len(alphabet)) {
			text = append(text, alphabet[token])
		}
	}
	return string(text), last
}

var alphabet = func() (all []byte) {
	for _, printed := range []bool{true, false} {
		for b := 0; b < 256; b++ {
			if printed == (b >= '!' && b <= '~' || b >= 0xA1 && b != 0xAD) {
				all = append(all, byte(b))
			}
		}
	}
	return all
}()
