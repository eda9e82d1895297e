//! The tokens of a sequence with the images among them: what pages are named by and prefixes compared by.
//!
//! A row is an image's if a span covers it; its token is a placeholder, equal for all images. So two sequences are equal up to
//! a length only if their tokens and their spans are. Spans are in ascending order and disjoint. The last one may reach beyond
//! the tokens, if a sequence was cut within an image. All rows of a sequence are computed with the same adapters, so sequences
//! with other adapters have nothing in common.

use std::borrow::Cow;

use super::PAGE_TOKENS;
use crate::adapters::AdapterUse;
use crate::images::ImageSpan;

/// Stands between a page's tokens and its images in the content that names the page.
const IMAGES: u32 = u32::MAX;

/// Stands in front of the adapters in the content that names a sequence's first page.
const ADAPTERS: u32 = u32::MAX - 1;

/// Tokens and images of a sequence, borrowed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens<'a> {
    pub ids: &'a [u32],
    pub images: &'a [ImageSpan],
    pub adapters: &'a [AdapterUse],
}

impl<'a> Tokens<'a> {
    pub fn len(self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the length of the common prefix, which ends before the first image that differs.
    pub fn common_prefix(self, other: Tokens<'_>) -> usize {
        if self.adapters != other.adapters {
            return 0;
        }
        let ids = self.ids.iter().zip(other.ids).take_while(|(a, b)| a == b).count();
        let equal = self.images.iter().zip(other.images).take_while(|(a, b)| a == b).count();
        let next = [self.images.get(equal), other.images.get(equal)].into_iter().flatten();
        next.map(|span| span.rows.start).fold(ids, usize::min)
    }

    /// Returns the span that covers a position.
    pub fn image_at(self, position: usize) -> Option<&'a ImageSpan> {
        let index = self.images.partition_point(|span| span.rows.end <= position);
        self.images.get(index).filter(|span| span.rows.start <= position)
    }

    /// Returns the number of images, of which each may have several spans, that begin at or before a position.
    pub fn num_images(self, position: usize) -> usize {
        self.images.iter().filter(|span| span.rows.start <= position && span.first == 0).count()
    }

    /// Returns `len`, or the start of the span that would be cut there.
    pub fn before_span(self, len: usize) -> usize {
        self.image_at(len).map_or(len, |span| span.rows.start)
    }

    /// Returns the content of a full page: its tokens, and if it has rows of images, a mark and for each image ten words: the
    /// offset of its first row in the page, that row's embedding, and the image's key. The first page has the adapters too.
    pub fn page(self, number: usize) -> Option<Cow<'a, [u32]>> {
        let rows = number * PAGE_TOKENS..(number + 1) * PAGE_TOKENS;
        let ids = self.ids.get(rows.clone())?;
        let first = self.images.partition_point(|span| span.rows.end <= rows.start);
        let mut spans = self.images[first..].iter().take_while(|span| span.rows.start < rows.end).peekable();
        let adapters = if number == 0 { self.adapters } else { &[] };
        if spans.peek().is_none() && adapters.is_empty() {
            return Some(Cow::Borrowed(ids));
        }
        let mut words = ids.to_vec();
        if !adapters.is_empty() {
            words.push(ADAPTERS);
            words.extend(AdapterUse::words(adapters));
        }
        words.extend(spans.peek().map(|_| IMAGES));
        for span in spans {
            let row = span.rows.start.max(rows.start);
            words
                .extend([row - rows.start, span.first + (row - span.rows.start)].map(|number| number as u32));
            words.extend(span.key.0.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
        }
        Some(Cow::Owned(words))
    }
}

impl<'a> From<&'a [u32]> for Tokens<'a> {
    fn from(ids: &'a [u32]) -> Self {
        Self { ids, ..Self::default() }
    }
}

impl<'a> From<&'a Vec<u32>> for Tokens<'a> {
    fn from(ids: &'a Vec<u32>) -> Self {
        ids.as_slice().into()
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Tokens<'a> {
    fn from(ids: &'a [u32; N]) -> Self {
        ids.as_slice().into()
    }
}

impl<'a> From<&'a TokenBuf> for Tokens<'a> {
    fn from(tokens: &'a TokenBuf) -> Self {
        Self { ids: &tokens.ids, images: &tokens.images, adapters: &tokens.adapters }
    }
}

/// Tokens and images of a sequence, owned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenBuf {
    pub ids: Vec<u32>,
    pub images: Vec<ImageSpan>,
    /// Adapters with which the rows are computed.
    pub adapters: Vec<AdapterUse>,
}

impl TokenBuf {
    pub fn as_tokens(&self) -> Tokens<'_> {
        self.into()
    }

    /// Appends `ids`, and of `images` those spans that begin among them.
    pub fn extend(&mut self, ids: &[u32], images: &[ImageSpan]) {
        let added = self.ids.len()..self.ids.len() + ids.len();
        self.ids.extend_from_slice(ids);
        self.images.extend(images.iter().filter(|span| added.contains(&span.rows.start)).cloned());
    }

    /// Keeps the first `len` tokens and the images that begin among them.
    pub fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.images.truncate(self.images.partition_point(|span| span.rows.start < len));
    }
}

impl From<Vec<u32>> for TokenBuf {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, ..Self::default() }
    }
}

impl From<Tokens<'_>> for TokenBuf {
    fn from(tokens: Tokens<'_>) -> Self {
        let Tokens { ids, images, adapters } = tokens;
        Self { ids: ids.to_vec(), images: images.to_vec(), adapters: adapters.to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::ImageKey;

    fn span(rows: std::ops::Range<usize>, key: u8, first: usize) -> ImageSpan {
        let grid = [1, rows.len() as u32];
        ImageSpan { rows, key: ImageKey([key; 32]), first, grid }
    }

    fn sequence(len: usize, images: &[ImageSpan]) -> TokenBuf {
        TokenBuf { ids: vec![7; len], images: images.to_vec(), ..TokenBuf::default() }
    }

    #[test]
    fn images_that_differ_end_the_common_prefix_at_their_first_row() {
        let known = sequence(90, &[span(5..20, 1, 0), span(30..60, 2, 0)]);
        let common =
            |len, images: &[ImageSpan]| known.as_tokens().common_prefix(sequence(len, images).as_tokens());
        assert_eq!(common(90, &known.images), 90);
        assert_eq!(common(45, &known.images), 45, "cut within an image");
        assert_eq!(common(90, &[span(5..20, 1, 0), span(30..60, 3, 0)]), 30, "another image");
        assert_eq!(common(90, &[span(5..20, 2, 0), span(30..60, 1, 0)]), 5, "swapped");
        assert_eq!(common(90, &[span(6..21, 1, 0)]), 5, "moved by one token");
        assert_eq!(common(90, &[span(5..20, 1, 0)]), 30, "dropped");
        assert_eq!(common(90, &[span(5..20, 1, 0), span(30..60, 2, 1)]), 30, "other rows of it");
    }

    #[test]
    fn a_page_is_told_apart_by_which_rows_of_which_images_it_has() {
        let page = |images: &[ImageSpan], number| {
            sequence(3 * PAGE_TOKENS, images).as_tokens().page(number).expect("full").into_owned()
        };
        let text = vec![7; PAGE_TOKENS];
        let images = [span(30..70, 1, 4), span(70..71, 2, 0)];
        assert_eq!(page(&[], 1), text);
        assert_eq!(page(&[span(0..3, 1, 0)], 1), text, "a page without rows of images keeps its content");
        let one = u32::from_le_bytes([1; 4]);
        assert_eq!(page(&images, 0), [&text[..], &[IMAGES, 30, 4], &[one; 8]].concat());
        assert_eq!(page(&images, 1), [&text[..], &[IMAGES, 0, 6], &[one; 8]].concat());
        let two = [one * 2; 8];
        assert_eq!(page(&images, 2), [&text[..], &[IMAGES, 0, 38], &[one; 8], &[6, 0], &two].concat());
        assert_eq!(sequence(40, &images).as_tokens().page(1), None);
    }

    #[test]
    fn tokens_and_images_are_cut_together() {
        let images = [span(5..20, 1, 0), span(30..60, 2, 0)];
        let mut tokens = TokenBuf::default();
        tokens.extend(&[7; 10], &images);
        tokens.extend(&[7; 25], &images);
        assert_eq!(tokens, sequence(35, &images), "each span once, the last beyond the tokens");
        let [inside, before] = [40, 25].map(|position| tokens.as_tokens().before_span(position));
        assert_eq!((inside, before, tokens.as_tokens().before_span(5)), (30, 25, 5));
        assert_eq!((tokens.as_tokens().num_images(4), tokens.as_tokens().num_images(30)), (0, 2));
        tokens.truncate(30);
        assert_eq!(tokens, sequence(30, &images[..1]));
    }
}
